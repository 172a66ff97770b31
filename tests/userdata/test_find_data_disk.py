"""Which disk is the data volume, by the programs of process machines and by identify data."""

from dataclasses import replace
from pathlib import Path

import pytest

from rehearsal.machines.process import EC2_DISKS, JsonDisk
from tests.userdata.rig import find_disk
from userdata.find_data_disk import NVME_COMMAND, short_name

INSTANCE_STORE = JsonDisk(
    name="nvme2n1", model="Amazon EC2 NVMe Instance Storage", serial="AWS1", device_name=""
)


@pytest.mark.parametrize("device_name", ["sdf", "/dev/sdf"])
def test_finds_the_volume_by_its_name_and_not_by_the_kernels(
    tmp_path: Path, device_name: str
) -> None:
    done = find_disk(tmp_path, "find_data_disk", device_name, INSTANCE_STORE, *EC2_DISKS)
    assert done.stdout == "/dev/nvme0n1\n"


def test_fails_when_two_disks_match_and_lists_both(tmp_path: Path) -> None:
    twin = replace(EC2_DISKS[0], name="nvme3n1", serial="voltwin", device_name="/dev/sdf")
    done = find_disk(tmp_path, "find_data_disk", "sdf", *EC2_DISKS, twin)
    assert done.returncode == 1
    assert done.stderr.startswith("2 EBS disks attached as sdf, expected one; found: ")
    assert "/dev/nvme0n1 (" in done.stderr
    assert "/dev/nvme3n1 (Amazon Elastic Block Store, voltwin, sdf)" in done.stderr


def test_fails_when_the_name_belongs_to_the_root_disk(tmp_path: Path) -> None:
    done = find_disk(tmp_path, "find_data_disk", "sda1", INSTANCE_STORE, EC2_DISKS[1])
    assert done.returncode == 1
    assert "holds /" in done.stderr
    assert "Amazon EC2 NVMe Instance Storage" in done.stderr


def test_names_in_identify_data_are_padded() -> None:
    assert short_name("/dev/sdf" + " " * 24) == "sdf"
    assert short_name("sdf" + "\0" * 29) == "sdf"


def test_nvme_command_has_the_size_that_its_ioctl_number_names() -> None:
    assert NVME_COMMAND.size == 0x48
