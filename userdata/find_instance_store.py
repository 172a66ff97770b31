"""Find the instance store: where the image has mounted it, or its only disk if nothing is mounted.

The Deep Learning AMI's dlami-nvme.service joins, formats and mounts all its disks; this program
leaves that to the image and waits for it. Run: python3 -m userdata.find_instance_store /data
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from userdata.find_data_disk import NoDiskYetError, holds_root, list_rows, print_when_found
from userdata.machine import machine_path

MODEL = "Amazon EC2 NVMe Instance Storage"
IMAGE_SERVICE = "dlami-nvme.service"
UNIT_FOLDERS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def mount_points(row: dict[str, Any]) -> Iterator[str]:
    """Yield where the disk, or a device made from it, is mounted."""
    yield from (point for point in row["mountpoints"] if point)
    for child in row.get("children", []):
        yield from mount_points(child)


def place(disks: Sequence[dict[str, Any]], *, data_mount: str, image_mounts: bool) -> str | None:
    """Return a folder or a device; None if there is none, none yet, or more than one."""
    points = {point for disk in disks for point in mount_points(disk)}
    if len(points) > 1:
        points.discard(data_mount)  # an earlier run of this step bound it there
    if len(points) == 1:
        return points.pop()
    if points or image_mounts or len(disks) != 1 or disks[0].get("children"):
        return None
    return str(disks[0]["name"])


def find_instance_store(data_mount: str) -> str:
    """Return the folder or the device of the instance store."""
    image_mounts = any(machine_path(f"{each}/{IMAGE_SERVICE}").exists() for each in UNIT_FOLDERS)
    rows = list_rows()
    disks = [row for row in rows if _model(row) == MODEL and not holds_root(row)]
    found = place(disks, data_mount=data_mount, image_mounts=image_mounts)
    if found is None:
        raise NoDiskYetError(_complaint(rows, disks, image_mounts=image_mounts))
    return found


def _model(row: dict[str, Any]) -> str:
    return (row["model"] or "").strip()


def _complaint(
    rows: Sequence[dict[str, Any]], disks: Sequence[dict[str, Any]], *, image_mounts: bool
) -> str:
    seen = "; ".join(
        f"{row['name']} ({_model(row) or 'no model'}, at {', '.join(mount_points(row)) or 'none'})"
        for row in rows
    )
    if not disks:
        wrong = "this machine has no instance store; deploy with data_on=ebs"
    elif image_mounts and not any(True for disk in disks for _ in mount_points(disk)):
        wrong = f"{IMAGE_SERVICE} has not mounted the instance store; read its journal"
    else:
        wrong = (
            f"{len(disks)} instance-store disks are not mounted in one place; use a Deep Learning "
            "AMI, which joins them, or deploy with data_on=ebs"
        )
    return f"{wrong}; found: {seen or 'none'}"


if __name__ == "__main__":
    sys.exit(print_when_found(lambda: find_instance_store(sys.argv[1])))
