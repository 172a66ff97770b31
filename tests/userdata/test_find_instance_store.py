"""Where the instance store is: the image's mount, or the one disk that nobody has touched."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rehearsal.machines.process import EC2_DISKS, JsonDisk
from tests.userdata.rig import Rig, calls, find_disk, wait
from userdata.find_instance_store import place

STORE = JsonDisk(
    name="nvme2n1", model="Amazon EC2 NVMe Instance Storage", serial="AWS1", device_name=""
)
ARGUMENTS = ("find_instance_store", "/data")
MOUNTED = replace(STORE, mounted="/opt/dlami/nvme", tags={"TYPE": "ext4", "UUID": "8f5b-1"})


@pytest.mark.parametrize(("disk", "found"), [(MOUNTED, "/opt/dlami/nvme"), (STORE, "/dev/nvme2n1")])
def test_finds_the_images_mount_or_the_only_disk(
    tmp_path: Path, disk: JsonDisk, found: str
) -> None:
    assert find_disk(tmp_path, *ARGUMENTS, *EC2_DISKS, disk).stdout == f"{found}\n"


def test_fails_on_a_size_without_an_instance_store_and_lists_its_disks(tmp_path: Path) -> None:
    done = find_disk(tmp_path, *ARGUMENTS, *EC2_DISKS)
    assert done.returncode == 1
    assert "this machine has no instance store; deploy with data_on=ebs; found: " in done.stderr
    assert "/dev/nvme1n1 (Amazon Elastic Block Store, at /)" in done.stderr


def test_fails_rather_than_format_disks_that_the_images_service_has_not_mounted_yet(
    tmp_path: Path,
) -> None:
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/system/dlami-nvme.service").touch()
    done = find_disk(tmp_path, *ARGUMENTS, *EC2_DISKS, STORE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "dlami-nvme.service has not mounted the instance store" in done.stderr


def row(*points: str | None, children: Sequence[object] = ()) -> dict[str, object]:
    return {"name": "/dev/nvme1n1", "mountpoints": list(points), "children": list(children)}


def test_what_several_disks_were_joined_to_is_one_place() -> None:
    volume = row("/opt/dlami/nvme")
    joined = [row(None, children=[volume]), row(None, children=[volume])]
    assert place(joined, data_mount="/data", image_mounts=True) == "/opt/dlami/nvme"


def test_what_the_step_itself_has_bound_is_no_second_place() -> None:
    bound = row(None, children=[row("/data", "/opt/dlami/nvme")])
    assert place([bound], data_mount="/data", image_mounts=True) == "/opt/dlami/nvme"
    assert place([row("/data")], data_mount="/data", image_mounts=False) == "/data"


@pytest.mark.parametrize(
    "disks",
    [
        [row(None), row(None)],
        [row("/a"), row("/b")],
        [row(None, children=[row(None)])],  # a partition, or a volume that is not mounted
    ],
)
def test_nothing_is_taken_where_more_than_one_could_be_meant(
    disks: list[dict[str, object]],
) -> None:
    assert place(disks, data_mount="/data", image_mounts=False) is None


@pytest.mark.parametrize(
    "disk",
    [
        pytest.param(MOUNTED, id="mounted by the image"),
        pytest.param(STORE, id="bare", marks=pytest.mark.slow),  # every boot formats a volume
    ],
)
def test_a_machine_boots_on_its_instance_store(rig: Rig, disk: JsonDisk) -> None:
    machine = rig.machine(disks=(EC2_DISKS[1], disk), variables=rig.run_env(DATA_ON="nvme"))
    wait(machine, "trainer listens")
    assert len(calls(machine, "run")) == 1
    kept = json.loads((machine.folder / "sys/disks/nvme2n1.json").read_text())
    assert kept.get("times_formatted") == (None if disk.mounted else 1)
    assert "/data" in (kept["mounted"], kept.get("bound"))
