"""What is written into a controller's identify data, and that nothing is written by guess."""

from pathlib import Path

import pytest

from tests.rehearsal.machines.qemu.identity import NotFound, give
from tests.rehearsal.machines.qemu.machine import DATA, STORE, Disk

HEAP = 8192


def controller(serial: str) -> bytes:
    """Identify data as QEMU makes it."""
    return (b"\x36\x1b\xf4\x1a" + serial.encode().ljust(20) + b"QEMU NVMe Ctrl".ljust(40)).ljust(
        4096, b"\0"
    )


def process(folder: Path, heap: bytes) -> tuple[Path, Path]:
    """A process's memory: the guest's, shared, at 0, and the heap behind it."""
    memory, maps = folder / "mem", folder / "maps"
    memory.write_bytes(heap[:HEAP].ljust(HEAP, b"\0") + heap)
    maps.write_text(
        f"00000000-{HEAP:08x} rw-s 00000000 00:01 9 /memfd:memory (deleted)\n"
        f"{HEAP:08x}-{HEAP + len(heap):08x} rw-p 00000000 00:00 0                  [heap]\n"
    )
    return memory, maps


@pytest.mark.parametrize(("disk", "name"), [(DATA, b"/dev/sdf".ljust(32)), (STORE, bytes(32))])
def test_a_controller_says_what_ec2_s_says_in_its_own_data_alone(
    disk: Disk, name: bytes, tmp_path: Path
) -> None:
    about = disk.identity
    other = controller("vol00112233445566778")
    memory, maps = process(tmp_path, b"heap" + other + controller(about.serial))
    before = memory.read_bytes()
    give(about, memory, maps)
    after = memory.read_bytes()
    at = HEAP + 4 + 4096
    assert after[:at] == before[:at], "neither the guest's memory nor another controller's"
    assert after[at : at + 64] == (
        b"\x0f\x1d\xf4\x1a" + about.serial.encode() + about.model.encode().ljust(40)
    )
    assert after[at + 3072 : at + 3104] == name


@pytest.mark.parametrize("count", [0, 2])
def test_fails_where_the_identify_data_is_not_there_once(count: int, tmp_path: Path) -> None:
    memory, maps = process(tmp_path, controller(DATA.identity.serial) * count + b"heap")
    with pytest.raises(NotFound, match=f"{count} times in QEMU's memory"):
        give(DATA.identity, memory, maps)
