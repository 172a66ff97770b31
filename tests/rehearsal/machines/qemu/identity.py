"""What an NVMe controller of QEMU's says that it is: EC2's words, written where QEMU keeps its own.

QEMU has no option for the model and the vendor's bytes of the identify data. They are written into
the memory of the running QEMU while the machine stands still, as an EBS controller's firmware would
have them; PCI device, queues, driver and the guest's ioctl are untouched.
"""

import re
from dataclasses import dataclass
from pathlib import Path

QEMU_MODEL = b"QEMU NVMe Ctrl"
AMAZON = 0x1D0F
# NVMe base specification, Identify Controller data structure: where each field begins.
VENDOR_AT, SERIAL_AT, MODEL_AT, VENDOR_SPECIFIC_AT = 0, 4, 24, 3072
SERIAL_BYTES, MODEL_BYTES, NAME_BYTES = 20, 40, 32


class NotFound(RuntimeError):
    """A controller's identify data is not in QEMU's memory once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Model, serial and the name of the attachment, which only EBS gives."""

    model: str
    serial: str
    device_name: str = ""


def give(identity: Identity, memory: Path, maps: Path) -> None:
    """Make the controller with this serial say the rest; the files are QEMU's in /proc."""
    serial = identity.serial.encode().ljust(SERIAL_BYTES)
    places = find(serial + QEMU_MODEL.ljust(MODEL_BYTES), memory, maps)
    if len(places) != 1:
        raise NotFound(f"identify data of {identity.serial}: {len(places)} times in QEMU's memory")
    data = places[0] - SERIAL_AT
    fields = {
        VENDOR_AT: AMAZON.to_bytes(2, "little"),
        MODEL_AT: identity.model.encode().ljust(MODEL_BYTES),
    }
    if identity.device_name:
        fields[VENDOR_SPECIFIC_AT] = identity.device_name.encode().ljust(NAME_BYTES)
    with memory.open("r+b", buffering=0) as file:
        for at, content in fields.items():
            file.seek(data + at)
            file.write(content)


def find(wanted: bytes, memory: Path, maps: Path) -> list[int]:
    """Return the addresses at which QEMU's own memory, not the guest's, has these bytes."""
    places: list[int] = []
    with memory.open("rb", buffering=0) as file:
        for line in maps.read_text().splitlines():
            region = re.fullmatch(r"(\w+)-(\w+) rw-p \w+ 00:00 0 +(\[heap\])?", line)
            if region is None:
                continue
            start, end = int(region[1], 16), int(region[2], 16)
            file.seek(start)
            content = file.read(end - start)
            places += [start + found.start() for found in re.finditer(re.escape(wanted), content)]
    return places
