"""Find the data volume: the EBS disk without / that EC2 attached under a given name.

It never uses kernel names: /dev/nvme1n1 may be another disk after the next boot. Unless exactly one
disk matches, it fails and lists what it saw. Run: python3 -m userdata.find_data_disk sdf
"""

import ctypes
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EBS_MODEL = "Amazon Elastic Block Store"
WAIT_SECONDS = 60.0
# linux/nvme_ioctl.h and the NVMe base specification: Identify, controller data structure.
NVME_IOCTL_ADMIN_COMMAND = 0xC0484E41
# nvme_passthru_cmd: opcode, address and size of the data, command word 10; all else is 0.
NVME_COMMAND = struct.Struct("=B23xQ4xII28x")
NVME_IDENTIFY = 0x06
IDENTIFY_CONTROLLER = 1
IDENTIFY_BYTES = 4096
# EBS writes the block device name at the start of the vendor-specific bytes (amazon-ec2-utils).
NAME_BYTES = slice(3072, 3104)


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """One disk as the machine reports it; `device_name` is EC2's name of the attachment."""

    path: str
    model: str
    serial: str
    device_name: str
    holds_root: bool

    def __str__(self) -> str:
        root = ", holds /" if self.holds_root else ""
        name = self.device_name or "no device name"
        return f"{self.path} ({self.model or 'no model'}, {self.serial}, {name}{root})"


def identify_controller(path: str) -> bytes:
    """Read the identify data of an NVMe disk (needs root)."""
    data = ctypes.create_string_buffer(IDENTIFY_BYTES)
    values = (NVME_IDENTIFY, ctypes.addressof(data), IDENTIFY_BYTES, IDENTIFY_CONTROLLER)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, NVME_IOCTL_ADMIN_COMMAND, bytearray(NVME_COMMAND.pack(*values)))
    finally:
        os.close(descriptor)
    return data.raw


def read_identity(row: dict[str, Any]) -> tuple[str, str]:
    """Return model and EC2 device name of a disk, from `ebsnvme-id` or its identify data."""
    model = (row["model"] or "").strip()
    if model != EBS_MODEL:
        return model, ""
    if program := shutil.which("ebsnvme-id"):
        done = subprocess.run(
            [program, "-b", row["name"]], capture_output=True, text=True, check=True
        )
        name = done.stdout.strip()
    else:
        name = identify_controller(row["name"])[NAME_BYTES].decode(errors="replace")
    return model, short_name(name)


def short_name(name: str) -> str:
    """Return a device name without padding and /dev/, which EC2 may add or omit."""
    return name.strip("\0 \n").removeprefix("/dev/")


def holds_root(row: dict[str, Any]) -> bool:
    """Return whether / is mounted from the disk or one of its partitions."""
    children: list[dict[str, Any]] = row.get("children", [])
    return "/" in row["mountpoints"] or any(holds_root(child) for child in children)


def list_rows() -> list[dict[str, Any]]:
    """Return what lsblk says of each disk of the machine."""
    columns = "NAME,TYPE,MODEL,SERIAL,MOUNTPOINTS"
    done = subprocess.run(
        ["lsblk", "--json", "--paths", "--output", columns],
        capture_output=True,
        text=True,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)["blockdevices"]
    return [row for row in rows if row["type"] == "disk"]


def list_disks() -> list[Disk]:
    """Return all disks of the machine."""
    disks = []
    for row in list_rows():
        model, name = read_identity(row)
        serial = row["serial"] or "no serial"
        root = holds_root(row)
        disk = Disk(path=row["name"], model=model, serial=serial, device_name=name, holds_root=root)
        disks.append(disk)
    return disks


def matching(disks: Sequence[Disk], device_name: str) -> list[Disk]:
    """Return the EBS disks attached under the given name that do not hold /."""
    wanted = short_name(device_name)
    return [
        disk
        for disk in disks
        if disk.model == EBS_MODEL and not disk.holds_root and disk.device_name == wanted
    ]


class NoDiskYetError(LookupError):
    """No disk matches yet, but one may still appear."""


def print_when_found(find: Callable[[], str]) -> int:
    """Print what `find` returns, once there is a disk; return the exit status."""
    give_up_at = time.monotonic() + float(os.environ.get("DISK_WAIT_SECONDS", WAIT_SECONDS))
    while True:
        try:
            print(find())
        except LookupError as error:
            if isinstance(error, NoDiskYetError) and time.monotonic() < give_up_at:
                time.sleep(1)
                continue
            why = str(error)
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", None) or ""
            why = f"could not list the disks: {error} {output}".strip()
        else:
            return 0
        print(why, file=sys.stderr)
        return 1


def find_data_disk(device_name: str) -> str:
    """Return the path of the data volume."""
    disks = list_disks()
    found = matching(disks, device_name)
    if len(found) == 1:
        return found[0].path
    count = f"{len(found)} EBS disks" if found else "no EBS disk"
    seen = "; ".join(str(disk) for disk in disks) or "none"
    raise (LookupError if found else NoDiskYetError)(
        f"{count} attached as {device_name}, expected one; found: {seen}; "
        "check the block device mappings of the launch template"
    )


if __name__ == "__main__":
    sys.exit(print_when_found(lambda: find_data_disk(sys.argv[1])))
