"""The blocks that one machine has read of its files are read ahead on the next, and no others."""

import json
import mmap
import os
import sys
from pathlib import Path

import pytest

from userdata import read_ahead

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="this system cannot read ahead"
)


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file of four and a half blocks, of which the page cache has nothing."""
    path = tmp_path / "library.so"
    path.write_bytes(os.urandom(9 * read_ahead.BLOCK_BYTES // 2))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if read_ahead._resident(path):
        pytest.skip("this file system keeps its files in memory")
    return path


def test_only_the_recorded_blocks_are_read(cold: Path) -> None:
    assert read_ahead.read_ahead([(str(cold), cold.stat().st_size, [1, 4])]) == (2, 2)
    assert read_ahead._resident(cold) == [1, 4]


def test_what_was_read_is_recorded_block_by_block(cold: Path) -> None:
    with cold.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 1, 3 * read_ahead.BLOCK_BYTES)
    assert read_ahead._resident(cold) == [3]


def test_a_process_records_its_modules_and_its_libraries(cold: Path, tmp_path: Path) -> None:
    with cold.open("rb") as file:
        library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert library[0] + library[-1] >= 0
    num_blocks = read_ahead.record(tmp_path / "reads.json")
    recorded = json.loads((tmp_path / "reads.json").read_text())
    assert num_blocks == sum(len(blocks) for _, _, blocks in recorded)
    by_path = {path: (size, blocks) for path, size, blocks in recorded}
    size, blocks = by_path[str(cold)]
    assert size == cold.stat().st_size
    assert {0, 4} <= set(blocks)
    module = sys.modules["json"]
    assert str(Path(module.__cached__).resolve()) in by_path


def test_a_file_that_is_another_now_is_left_alone(cold: Path, tmp_path: Path) -> None:
    size = cold.stat().st_size
    os.mkfifo(tmp_path / "pipe")
    gone = (str(tmp_path / "gone"), size, [0])
    asked = [(str(cold), size + 1, [0]), gone, (str(tmp_path / "pipe"), 0, [0])]
    assert read_ahead.read_ahead(asked) == (0, 3)
    assert read_ahead._resident(cold) == []


@pytest.mark.parametrize("text", ["{", "[[1]]", '[["/no/such/file", 1, [0]]]', "null"])
def test_a_list_of_another_image_goes_and_fails_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "reads.json"
    found.write_text(text)
    monkeypatch.setattr(sys, "argv", ["read_ahead", str(found)])
    assert read_ahead.main() == 0
    assert not found.exists()
