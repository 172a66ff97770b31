#!/usr/bin/env -S python3 -I -S
"""Disk programs of a process machine: lsblk, blkid, wipefs, mkfs.xfs, mount, findmnt, ebsnvme-id.

A disk is a JSON file below $MACHINE_ROOT/sys/disks and a folder to which a mount links, so that a
formatted disk stays formatted and keeps its files. Options that the boot programs do not use are
refused by name.
"""

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

NOTHING_FOUND = 2


def disks_folder() -> Path:
    """Return the folder of the machine's disks."""
    return Path(os.environ["MACHINE_ROOT"]) / "sys/disks"


def read_disks() -> dict[str, dict[str, Any]]:
    """Return all disks that have appeared, by their path in /dev."""
    files = sorted(disks_folder().glob("*.json"))
    disks = {f"/dev/{file.stem}": json.loads(file.read_text()) for file in files}
    return {path: disk for path, disk in disks.items() if disk["appears_at"] <= time.time()}


def write_disk(path: str, disk: dict[str, Any]) -> None:
    """Save a changed disk."""
    file = disks_folder() / f"{Path(path).name}.json"
    file.write_text(json.dumps(disk, indent=1) + "\n")


def disk_at(path: str) -> dict[str, Any]:
    """Return one disk; exit if it does not exist, as the real programs do."""
    disks = read_disks()
    if path not in disks:
        sys.exit(f"{path}: no such block device on this process machine")
    return disks[path]


def lsblk(arguments: list[str]) -> int:
    """List the disks; the root disk has one partition, as on EC2."""
    expect(arguments, ["--json", "--paths", "--output", "NAME,TYPE,MODEL,SERIAL,MOUNTPOINTS"])
    rows = []
    for path, disk in read_disks().items():
        row: dict[str, Any] = {
            "name": path,
            "type": "disk",
            "model": disk["model"],
            "serial": disk["serial"],
            "mountpoints": [disk["mounted"], *([disk["bound"]] if "bound" in disk else [])],
        }
        if disk["holds_root"]:
            part = {"name": f"{path}p1", "type": "part", "model": None, "serial": None}
            row["children"] = [{**part, "mountpoints": ["/"]}]
        rows.append(row)
    print(json.dumps({"blockdevices": rows}))
    return 0


def blkid(arguments: list[str]) -> int:
    """Print the type or UUID of a disk's file system; return 2 if it has none."""
    expect(arguments[:2], ["--probe", "--match-tag"])
    expect(arguments[3:5], ["--output", "value"])
    tag, path = arguments[2], arguments[5]
    value = disk_at(path)["tags"].get(tag)
    if value is None:
        return NOTHING_FOUND
    print(value)
    return 0


def wipefs(arguments: list[str]) -> int:
    """Print one line for each signature on a disk; wipe nothing."""
    expect(arguments[:1], ["--noheadings"])
    disk = disk_at(arguments[1])
    for signature in disk["signatures"]:
        print(f"{Path(arguments[1]).name} 0x0 {signature}")
    return 0


def mkfs_xfs(arguments: list[str]) -> int:
    """Make a file system; refuse a disk with signatures, as the real one does without -f."""
    expect(arguments[:1], ["-q"])
    path = arguments[1]
    disk = disk_at(path)
    if disk["signatures"]:
        sys.exit(f"mkfs.xfs: {path} appears to contain an existing {disk['signatures'][0]}.")
    disk["tags"] = {"TYPE": "xfs", "UUID": str(uuid.uuid4())}
    disk["signatures"] = ["xfs"]
    disk["times_formatted"] = disk.get("times_formatted", 0) + 1
    (disks_folder() / Path(path).name).mkdir()
    write_disk(path, disk)
    return 0


def mount(arguments: list[str]) -> int:
    """Mount a folder's fstab entry: replace the folder with a link to the disk's files."""
    if arguments[:1] == ["--bind"]:
        return bind(Path(arguments[1]), Path(arguments[2]))
    if len(arguments) != 1:
        sys.exit(f"mount: process machines support only `mount FOLDER`, got {arguments}")
    folder = Path(arguments[0])
    point = inside(arguments[0])
    root = Path(os.environ["MACHINE_ROOT"])
    entries = [line.split() for line in (root / "etc/fstab").read_text().splitlines()]
    found = [entry for entry in entries if len(entry) == 6 and entry[1] == point]
    if not found:
        sys.exit(f"mount: {point}: can't find in /etc/fstab.")
    source, kind = found[0][0], found[0][2]
    for path, disk in read_disks().items():
        if source == f"UUID={disk['tags'].get('UUID')}" and kind == disk["tags"]["TYPE"]:
            # rmdir refuses a folder with files; on EC2 the mount would hide them.
            folder.rmdir()
            folder.symlink_to(disks_folder() / Path(path).name)
            write_disk(path, {**disk, "mounted": point})
            return 0
    sys.exit(f"mount: {point}: can't find {source} of type {kind}.")


def bind(source: Path, folder: Path) -> int:
    """Bind a disk that is mounted elsewhere to a second folder."""
    for path, disk in read_disks().items():
        if disk["mounted"] == inside(str(source)):
            files = disks_folder() / Path(path).name
            files.mkdir(exist_ok=True)
            folder.rmdir()
            folder.symlink_to(files)
            write_disk(path, {**disk, "bound": inside(str(folder))})
            return 0
    sys.exit(f"mount: {folder}: process machines can bind only a disk's mount point")


def findmnt(arguments: list[str]) -> int:
    """Print the UUID of the disk mounted on a folder; return 1 if none is mounted."""
    expect(arguments[:-1], ["--noheadings", "--output", "UUID", "--mountpoint"])
    point = inside(arguments[-1])
    disks = read_disks().values()
    uuids = [d["tags"]["UUID"] for d in disks if point in (d["mounted"], d.get("bound"))]
    print("\n".join(uuids), end="\n" if uuids else "")
    return 0 if uuids else 1


def ebsnvme_id(arguments: list[str]) -> int:
    """Print the name under which EC2 attached an EBS volume."""
    expect(arguments[:1], ["-b"])
    disk = disk_at(arguments[1])
    if not disk["device_name"]:
        sys.exit(f"[ERROR] Not an EBS device: {arguments[1]}")
    print(disk["device_name"])
    return 0


def inside(path: str) -> str:
    """Return a path on this host as seen inside the machine."""
    return path.removeprefix(os.environ["MACHINE_ROOT"])


def expect(got: list[str], known: list[str]) -> None:
    """Refuse options that this program does not support."""
    if got != known:
        sys.exit(f"process machines support only {' '.join(known)} here, got {' '.join(got)}")


PROGRAMS = {
    "lsblk": lsblk,
    "blkid": blkid,
    "wipefs": wipefs,
    "mkfs.xfs": mkfs_xfs,
    "mount": mount,
    "findmnt": findmnt,
    "ebsnvme-id": ebsnvme_id,
}

if __name__ == "__main__":
    sys.exit(PROGRAMS[Path(sys.argv[0]).name](sys.argv[1:]))
