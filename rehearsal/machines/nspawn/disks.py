"""The disks of an nspawn machine: loop devices under NVMe names, described in /etc/disks.json.

The machine's own systemd-tmpfiles creates their device files at each boot, as udev would.
"""

import errno
import fcntl
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rehearsal.machines.commands import run
from rehearsal.machines.quirks import EBS, KEPT, KEPT_TEXT, PARTITION_TABLE, Volume

INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
INSTANCE_STORE_MIB = 512
LOOP_MAJOR = 7
PARTITIONS_AT = 446  # in a master boot record
DESCRIPTION, DEVICE_FILES = "etc/disks.json", "etc/tmpfiles.d/disks.conf"
_MIB = 2**20
# linux/loop.h
LOOP_CTL_GET_FREE = 0x4C82
LOOP_CONFIGURE = 0x4C0A
LO_FLAGS_AUTOCLEAR = 4
BLOCK_BYTES = 512
# struct loop_config: fd and block size, then struct loop_info64, of which only lo_flags is set.
_CONFIG_BYTES = 304
_FLAGS_AT = 60
_ROOT_DISK = {
    "name": "/dev/nvme0n1",
    "model": EBS,
    "serial": "vol00112233445566778",
    "device_name": "sda1",
    "loop": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeDisk:
    """One disk other than the root disk; its kernel name does not tell what it holds."""

    name: str
    model: str
    serial: str
    device_name: str  # under which EC2 attached it; empty for an instance store
    volume: Volume


def disks_of(volumes: Sequence[Volume]) -> list[NvmeDisk]:
    """Return a machine's disks; whoever trusts kernel names formats the instance store."""
    store = NvmeDisk(
        name="/dev/nvme1n1",
        model=INSTANCE_STORE,
        serial="AWS1234567890ABCDEF0",
        device_name="",
        volume=Volume(mib=INSTANCE_STORE_MIB),
    )
    return [
        store,
        *(
            NvmeDisk(
                name=f"/dev/nvme{number}n1",
                model=EBS,
                serial=f"vol0d1a2b3c4d5e6f7{number:02d}",
                device_name=volume.device_name,
                volume=volume,
            )
            for number, volume in enumerate(volumes, start=2)
        ),
    ]


class LoopDevice:
    """A file as a block device, which the kernel detaches once it is neither open nor mounted."""

    def __init__(self, file: Path) -> None:
        control = os.open("/dev/loop-control", os.O_RDWR)
        backing = os.open(file, os.O_RDWR)
        try:
            while True:
                self.number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                self._device = os.open(self.path, os.O_RDWR)
                try:
                    fcntl.ioctl(self._device, LOOP_CONFIGURE, _config(backing))
                    return
                except OSError as error:
                    os.close(self._device)
                    if error.errno != errno.EBUSY:
                        raise
                    # Another process took the device first.
        finally:
            os.close(backing)
            os.close(control)

    @property
    def path(self) -> Path:
        """The device's file."""
        return Path(f"/dev/loop{self.number}")

    def close(self) -> None:
        """Close it; the kernel detaches it once it is no longer mounted anywhere."""
        os.close(self._device)


def _config(backing: int) -> bytes:
    config = bytearray(_CONFIG_BYTES)
    struct.pack_into("=II", config, 0, backing, BLOCK_BYTES)
    struct.pack_into("=I", config, _FLAGS_AT, LO_FLAGS_AUTOCLEAR)
    return bytes(config)


@dataclass(kw_only=True)
class Disks:
    """All disks of one machine; `folder` has a file for each."""

    folder: Path
    disks: Sequence[NvmeDisk]
    _loops: dict[str, LoopDevice] = field(default_factory=dict)

    def make(self) -> None:
        """Create the files, with the volumes' content."""
        for disk in self.disks:
            file = self._file(disk)
            with file.open("wb") as opened:
                opened.truncate(disk.volume.mib * _MIB)
            _fill(file, disk.volume.content)

    def attach(self, root: Path, seconds: float) -> None:
        """Attach the disks present this long after power-on; the machine creates device files."""
        for disk in self.disks:
            if disk.volume.late_seconds <= seconds and disk.name not in self._loops:
                self._loops[disk.name] = LoopDevice(self._file(disk))
        lines = [
            f"b {path} 0660 root disk - {LOOP_MAJOR}:{loop.number}\n"
            for name, loop in self._loops.items()
            for path in (loop.path, name)
        ]
        _write(root / DEVICE_FILES, "".join(lines))

    def describe(self, root: Path) -> None:
        """Describe the attached disks to the machine's programs, which then list them."""
        rows = [_ROOT_DISK]
        for disk in self.disks:
            if disk.name in self._loops:
                about = {name: text for name, text in asdict(disk).items() if name != "volume"}
                rows.append({**about, "loop": str(self._loops[disk.name].path)})
        _write(root / DESCRIPTION, json.dumps(rows))

    def delete(self) -> None:
        """Detach and delete all disks, as EC2 does after an instance's termination."""
        for loop in self._loops.values():
            loop.close()
        self._loops.clear()
        for disk in self.disks:
            self._file(disk).unlink(missing_ok=True)

    def _file(self, disk: NvmeDisk) -> Path:
        return self.folder / f"{Path(disk.name).name}.img"


def _write(path: Path, text: str) -> None:
    """Replace a running machine's file atomically, so that the machine never reads half of it."""
    new = path.with_name(f"{path.name}.new")
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(text)
    new.rename(path)


def _fill(file: Path, content: str) -> None:
    if content == PARTITION_TABLE:
        with file.open("r+b") as disk:
            disk.seek(PARTITIONS_AT)
            # One partition of type Linux, from the first MiB on, and the table's signature.
            disk.write(struct.pack("<4xB3xII48x2s", 0x83, 2048, 8192, b"\x55\xaa"))
    elif content:
        options = {"xfs": ["-q"], "ext4": ["-q", "-F"]}[content]
        run(f"mkfs.{content}", *options, file)
        mounted = file.with_suffix(".mounted")
        mounted.mkdir()
        run("mount", "-o", "loop", file, mounted)
        (mounted / KEPT).write_text(KEPT_TEXT)
        run("umount", mounted)
        mounted.rmdir()
