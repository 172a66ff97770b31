"""Parts in parallel: composite checksums, every damage found, nothing left open after an error."""

import hashlib
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.training.save_scene import write_state
from tests.training.transfers import Memory
from training.durable.attempt.resume_point import DamagedCheckpointError
from training.durable.save.tensors.resume import CheckpointContent
from training.durable.save.tensors.state import LiveState
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Store
from training.durable.store.transfer import (
    CancelledError,
    FileEntry,
    TransferProgress,
    checksum_of,
    part_bytes_of,
    receive,
    run_all,
    send,
)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.durable.store.transfer.PART_BYTES", 64)


def sent(store: Store, data: bytes) -> FileEntry:
    progress = TransferProgress()
    (entry,) = send(store, "x/", [Memory(data)], progress)
    assert progress.done_bytes == len(data)
    return entry


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_a_file_of_any_size_comes_back(tmp_path: Path, size: int) -> None:
    store = FolderStore(tmp_path)
    data = bytes(k % 251 for k in range(size))
    entry = sent(store, data)
    back = bytearray(size)

    def place(start: int, block: memoryview) -> None:
        back[start : start + len(block)] = block

    assert receive(store, "x/file", entry, place)
    assert bytes(back) == data
    assert (entry.name, entry.bytes) == ("file", size)


def test_a_file_never_has_more_parts_than_s3_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.durable.store.transfer.PART_BYTES", 8 * 2**20)
    assert part_bytes_of(17 * 10**9) == 8 * 2**20
    assert -(-(10**13) // part_bytes_of(10**13)) <= 10_000


@pytest.mark.parametrize(
    ("mebibytes", "part_mebibytes"), [(1, 8), (300, 8), (520, 16), (10_000, 32), (10**6, 104)]
)
def test_parts_of_shared_memory_grow_once_every_connection_has_two(
    monkeypatch: pytest.MonkeyPatch, mebibytes: int, part_mebibytes: int
) -> None:
    monkeypatch.setattr("training.durable.store.transfer.PART_BYTES", 8 * 2**20)
    assert part_bytes_of(mebibytes * 2**20, is_shared=True) == part_mebibytes * 2**20


def test_a_part_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every thread would need memory for the largest part that anybody sent."""
    store = FolderStore(tmp_path)
    store.put("x/file", bytes(range(200)))
    digests = [hashlib.sha256(bytes(range(200))[at : at + 150]).digest() for at in (0, 150)]
    entry = FileEntry(name="file", bytes=200, sha256=checksum_of(digests), part_bytes=150)
    places: dict[int, int] = {}
    assert receive(store, "x/file", entry, lambda at, block: places.update({at: len(block)}))
    assert places == {0: 64, 64: 64, 128: 22, 150: 50}


def test_a_flipped_bit_in_any_part_of_any_file_is_found(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    tensors = {"w": torch.arange(100.0), "b": torch.ones(3)}
    capture = LiveState(tensors={"model": tensors, "optimizer": {}}, state={"step": 1})
    entry = write_state(store, capture)
    CheckpointContent.read(store, entry)
    for file in entry.files:
        path = tmp_path / "checkpoints" / entry.name / file.name
        whole = path.read_bytes()
        for place in {*range(0, min(400, len(whole)), 7), len(whole) // 2, len(whole) - 1}:
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(DamagedCheckpointError, match=f"^{file.name}"):
                CheckpointContent.read(store, entry)
        path.write_bytes(whole[:-1])
        with pytest.raises(DamagedCheckpointError, match="bytes instead of"):
            CheckpointContent.read(store, entry)
        path.write_bytes(whole)
    assert CheckpointContent.read(store, entry).state == {"step": 1}


def test_two_parts_that_changed_places_are_found(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    entry = sent(store, b"a" * 64 + b"b" * 64)
    (tmp_path / "x" / "file").write_bytes(b"b" * 64 + b"a" * 64)
    assert not receive(store, "x/file", entry, lambda start, block: None)


def test_a_checkpoint_of_format_1_is_read(tmp_path: Path) -> None:
    """It has one sha256 over the whole of each file, however large."""
    store = FolderStore(tmp_path)
    data = bytes(range(200))
    store.put("x/file", data)
    entry = FileEntry(name="file", bytes=200, sha256=hashlib.sha256(data).hexdigest())
    assert receive(store, "x/file", entry, lambda start, block: None)


def test_an_error_stops_the_others_and_leaves_nothing_behind(tmp_path: Path) -> None:
    class Full(FolderStore):
        def upload(self, *arguments):  # type: ignore[no-untyped-def]
            upload = super().upload(*arguments)
            put = upload.put

            def put_until_full(number, start, data, sha256):  # type: ignore[no-untyped-def]
                if start >= 640:
                    raise OSError(28, "No space left on device")
                put(number, start, data, sha256)

            upload.put = put_until_full  # type: ignore[method-assign]
            return upload

    with pytest.raises(OSError, match="No space left"):
        sent(Full(tmp_path), bytes(2000))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_transfer_that_is_stopped_ends_before_its_next_part(tmp_path: Path) -> None:
    progress = TransferProgress()
    progress.stop.set()
    with pytest.raises(CancelledError):
        send(FolderStore(tmp_path), "x/", [Memory(bytes(999))], progress)
    assert FolderStore(tmp_path).sizes("") == {}


def test_tasks_run_at_once_and_the_first_error_is_raised() -> None:
    barrier = threading.Barrier(3)
    run_all([barrier.wait] * 3, 3)  # type: ignore[list-item]

    def fail() -> None:
        raise ValueError("this one")

    done: list[int] = []
    tasks = [fail, *[lambda: (time.sleep(0.001), done.append(1))[0]] * 1000]
    with pytest.raises(ValueError, match="this one"):
        run_all(tasks, 2)
    assert len(done) < 1000
