"""A drill's volumes on a process machine: there or not, late, named otherwise, with content."""

import json
import subprocess
from pathlib import Path

import pytest

from rehearsal.machines.process import SHIMS, disks_of, write_disks
from rehearsal.machines.quirks import Quirks, Volume

LSBLK = ("lsblk", "--json", "--paths", "--output", "NAME,TYPE,MODEL,SERIAL,MOUNTPOINTS")


def say(root: Path, *command: str) -> str:
    """Run one of the machine's disk programs."""
    environment = {"MACHINE_ROOT": str(root), "PATH": f"{SHIMS}:/usr/bin:/bin"}
    done = subprocess.run(
        [f"{SHIMS}/{command[0]}", *command[1:]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def attach(root: Path, *volumes: Volume) -> list[str]:
    """Attach volumes; return the disks that lsblk then lists."""
    folder = root / "sys/disks"
    folder.mkdir(parents=True)
    write_disks(folder, disks_of(volumes), filled=True)
    return [row["name"] for row in json.loads(say(root, *LSBLK))["blockdevices"]]


def test_a_machine_has_the_volumes_of_its_drill(tmp_path: Path) -> None:
    assert Quirks().volumes == (Volume(device_name="sdf"),)
    assert attach(tmp_path / "none") == ["/dev/nvme1n1"]
    late = attach(tmp_path / "late", Volume(late_seconds=600))
    assert late == ["/dev/nvme1n1"], "it has not appeared yet"
    two = attach(tmp_path / "two", Volume(), Volume())
    assert two == ["/dev/nvme0n1", "/dev/nvme1n1", "/dev/nvme2n1"]
    assert len(attach(tmp_path / "five", *[Volume()] * 5)) == 1 + 5
    attach(tmp_path / "other", Volume(device_name="sdg"))
    assert say(tmp_path / "other", "ebsnvme-id", "-b", "/dev/nvme0n1") == "sdg"


@pytest.mark.parametrize(
    ("content", "kind", "signature"),
    [("", "", ""), ("ext4", "ext4", "ext4"), ("partition table", "", "dos")],
)
def test_what_is_on_a_volume_is_found(
    content: str, kind: str, signature: str, tmp_path: Path
) -> None:
    attach(tmp_path, Volume(content=content))
    probe = ("--probe", "--match-tag", "TYPE", "--output", "value", "/dev/nvme0n1")
    assert say(tmp_path, "blkid", *probe) == kind
    assert say(tmp_path, "wipefs", "--noheadings", "/dev/nvme0n1").endswith(signature)
    kept = tmp_path / "sys/disks/nvme0n1/kept.txt"
    assert kept.exists() == (kind != "")


def test_fails_content_that_no_volume_can_have() -> None:
    with pytest.raises(ValueError, match=r"content is 'ntfs'; use one of: '', 'xfs', 'ext4'"):
        Volume(content="ntfs")


@pytest.mark.parametrize("quirks", [Quirks(memory_mib=500), Quirks(disks=(Volume(mib=64),))])
def test_fails_a_size_that_a_process_machine_cannot_have(quirks: Quirks) -> None:
    with pytest.raises(ValueError, match="memory_mib and mib need machines of kind nspawn"):
        quirks.check_for_process_machine()
