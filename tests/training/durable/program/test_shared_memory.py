"""What a killed program leaves in /dev/shm is removed, and nothing that is another's."""

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.durable.program.process import SharedMemory

SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="Linux only")
MAPS = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def mapping(path: Path) -> Iterator[None]:
    """A process below this one that has created this segment and maps it, until it is killed."""
    words = [sys.executable, "-c", MAPS, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.kill()


@pytest.fixture
def names() -> Iterator[list[Path]]:
    found = [SHM / f"test-{secrets.token_hex(8)}" for _ in range(3)]
    yield found
    for path in found:
        path.unlink(missing_ok=True)


def test_the_next_start_removes_what_a_killed_program_has_mapped_and_nothing_else(
    names: list[Path],
) -> None:
    before, ours, anothers = names
    uri = f"file:///{secrets.token_hex(8)}"
    before.write_bytes(b"x")
    life = SharedMemory(uri)
    anothers.write_bytes(b"x")
    with mapping(ours), mapping(before):
        life.look()
        SharedMemory(uri)  # a rival's start, while it is in use
        assert ours.exists()
    SharedMemory("file:///another-run")
    assert ours.exists()
    SharedMemory(uri)
    assert [path.exists() for path in names] == [True, False, True]
    assert not life._list.exists()
