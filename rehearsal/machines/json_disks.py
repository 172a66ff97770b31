"""The disks of a process machine: a JSON file each, which its disk programs (disks.py) read."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rehearsal.machines.quirks import EBS, KEPT, KEPT_TEXT, PARTITION_TABLE, Volume


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonDisk:
    """One NVMe disk as the machine's programs see it; `signatures` is what wipefs finds."""

    name: str
    model: str = EBS
    serial: str
    device_name: str
    holds_root: bool = False
    mounted: str | None = None
    signatures: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    appears_at: float = 0.0  # in the seconds of time.time()


# The data volume comes first on purpose: whoever trusts kernel names formats the wrong disk.
EC2_DISKS = (
    JsonDisk(name="nvme0n1", serial="vol0d1a2b3c4d5e6f708", device_name="sdf"),
    JsonDisk(
        name="nvme1n1",
        serial="vol00112233445566778",
        device_name="sda1",
        holds_root=True,
        signatures=("gpt",),
    ),
)


def disks_of(volumes: Sequence[Volume]) -> list[JsonDisk]:
    """Return the disks of a machine that powers on now."""
    numbers = (0, *range(2, len(volumes) + 1))
    named = zip(numbers, volumes, strict=False)
    return [EC2_DISKS[1], *(_disk(f"nvme{number}n1", volume) for number, volume in named)]


def _disk(name: str, volume: Volume) -> JsonDisk:
    kind = {PARTITION_TABLE: "dos"}.get(volume.content, volume.content)
    is_file_system = volume.content not in ("", PARTITION_TABLE)
    return JsonDisk(
        name=name,
        serial=f"vol0d1a2b3c4d5e6f7{name[4:-2]:0>2}",
        device_name=volume.device_name,
        signatures=(kind,) if kind else (),
        tags={"TYPE": kind, "UUID": str(uuid.uuid4())} if is_file_system else {},
        appears_at=time.time() + volume.late_seconds if volume.late_seconds else 0.0,
    )


def write_disks(folder: Path, disks: Sequence[JsonDisk], *, filled: bool) -> None:
    """Write each disk's JSON file and, if `filled`, the files on disks with a file system."""
    for disk in disks:
        text = json.dumps(asdict(disk), indent=1)
        (folder / f"{disk.name}.json").write_text(text + "\n")
        if filled and "UUID" in disk.tags:
            (folder / disk.name).mkdir()
            (folder / disk.name / KEPT).write_text(KEPT_TEXT)
