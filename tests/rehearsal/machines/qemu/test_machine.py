"""Machines in QEMU: what a container cannot have, under the real userdata/ programs.

Real: the kernel with its NVMe driver and hot-plug, the controllers' registers and queues, the
ioctl, systemd, cloud-init by DMI data, reboots. Ours: the words in the identify data.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.userdata.rig import REPOSITORY

# Three boots without KVM, each of minutes.
pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.timeout(3600)]

EBS = "Amazon Elastic Block Store"
STORE = "Amazon EC2 NVMe Instance Storage"
ROOT_SERIAL, DATA_SERIAL = "vol00112233445566778", "vol0d1a2b3c4d5e6f708"
STORE_SERIAL = "AWS1234567890ABCDEF0"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one machine's lives."""
    folder = tmp_path_factory.mktemp("qemu")
    command = [sys.executable, "-m", "tests.rehearsal.machines.qemu.lives", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "machine").exists()
    assert str(folder) not in Path("/proc/mounts").read_text()
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_the_user_data_boots_unmodified_as_cloud_init_finds_ec2_by_itself(
    report: dict[str, Any],
) -> None:
    first = report["first_boot"]
    assert first["user_data"] == report["user_data"].strip()
    assert first["cloud"] == "aws"
    assert first["dmi"].split("\n") == ["Amazon EC2", "g5.xlarge", report["instance_id"]]
    assert "AWS_" not in first["variables"], "as on EC2, no endpoint is given"


def test_the_identify_ioctl_reads_4096_bytes_of_every_controller(report: dict[str, Any]) -> None:
    assert report["first_boot"]["driver"] == "/sys/bus/pci/drivers/nvme"
    rows = [line.split("|") for line in report["first_boot"]["identify"]]
    seen = {serial: (size, vendor, model, name) for size, vendor, serial, model, name, _ in rows}
    assert seen == {
        ROOT_SERIAL: ("4096", "0f1d", EBS.ljust(40), "/dev/sda1".ljust(32)),
        STORE_SERIAL: ("4096", "0f1d", STORE.ljust(40), "\0" * 32),
        DATA_SERIAL: ("4096", "0f1d", EBS.ljust(40), "/dev/sdf".ljust(32)),
    }
    assert {row[5] for row in rows} == {
        f"/dev/nvme0n1 ({EBS}, {ROOT_SERIAL}, sda1, holds /)",
        f"/dev/nvme1n1 ({STORE}, {STORE_SERIAL}, no device name)",
        f"/dev/nvme2n1 ({EBS}, {DATA_SERIAL}, sdf)",
    }


def test_the_empty_volume_named_sdf_gets_a_file_system_and_the_instance_store_none(
    report: dict[str, Any],
) -> None:
    first = report["first_boot"]
    source, kind, uuid = first["source"].split()
    assert (source, kind, first["kept"]) == ("/dev/nvme2n1", "xfs", "kept")
    assert f"/dev/nvme2n1 at /data, xfs file system made, UUID {uuid}" in first["data_volume"]
    assert first["fstab"].startswith(f"UUID={uuid} /data xfs defaults,nofail,noatime,")
    assert first["store"] == ""


def test_a_reboot_mounts_the_volume_by_uuid_before_our_boot_looks_for_it(
    report: dict[str, Any],
) -> None:
    first, again = report["first_boot"], report["reboot"]
    assert "xfs file system found" in again["data_volume"]
    assert again["source"].split()[1:] == first["source"].split()[1:]
    assert again["kept"] == "kept"
    assert 0 < again["mounted_at"] < again["boot_began_at"]


def test_a_machine_without_its_volume_comes_up_says_so_and_takes_one_that_comes_late(
    report: dict[str, Any],
) -> None:
    late = report["without_volume"]
    assert late["local_fs"].split() == ["active", "inactive"], "nofail: no emergency"
    assert late["before"] == ""
    assert "attempt 1 of 3 failed: no EBS disk attached as /dev/sdf, expected one" in late["says"]
    # It came before the instance store, which was first at the first boot.
    assert "/dev/nvme1n1 at /data, xfs file system found" in late["data_volume"]
    assert late["source"].split()[1:] == report["first_boot"]["source"].split()[1:]
    assert late["kept"] == "kept"


def test_a_machine_whose_memory_runs_out_says_so(report: dict[str, Any]) -> None:
    why = "; the kernel killed a process of it: out of memory)"
    assert any(why in message for message in report["out_of_memory"]["messages"])


def test_a_volume_lost_in_mid_run_ends_the_machine_and_never_the_run(
    report: dict[str, Any],
) -> None:
    lost = report["lost"]
    assert lost["writer"] == "OSError: [Errno 5] Input/output error"
    # Before that, the boots that earlier scenes cut short.
    assert (
        "training failed (exit-code, exit status 4): the data volume is no longer mounted at /data"
        in lost["messages"]
    )
    assert lost["heads"] == []
    assert lost["target_capacity"] == 1


def test_a_volume_with_a_partition_table_is_left_untouched(report: dict[str, Any]) -> None:
    assert (
        "contains something other than a file system, left untouched" in report["foreign"]["says"]
    )
    assert report["foreign"]["is_untouched"]
