"""How a sync fetches: in the order of the reads, part by part, and never anything twice."""

import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contract.errors import UserError
from training.durable.store import dataset as fetching
from training.durable.store.dataset import StoredDataset
from training.durable.store.folder import FolderStore
from training.durable.store.local_dataset import LocalDataset, announce, is_syncing, no_progress
from training.durable.store.protocol import StoreError

PART = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PART_BYTES", PART)
    # As many threads as the store says: with one, the order is exact.
    monkeypatch.setattr(fetching, "_SMALL_PART_BYTES", 0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Eight files, of none to six parts."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(8):
        (folder / f"shard-{number}").write_bytes(random.Random(number).randbytes(number * 811))
    LocalDataset.complete(folder, "nobody's", {})
    return folder


class Noted(FolderStore):
    """A store that notes what is read of it; `num_threads` and a pause can be set."""

    def __init__(self, folder: Path, log: Path, *, num_threads: int = 1, pause: float = 0) -> None:
        super().__init__(folder)
        self.num_threads = num_threads
        self._log, self._pause = log, pause

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        time.sleep(self._pause * random.random())
        super().read_into(key, start, data)
        with self._log.open("a") as log:
            log.write(f"{key} {start}\n")

    def keys(self) -> list[str]:
        """What was read, each file once."""
        return list(dict.fromkeys(key for key, _ in reads(self._log)))


def reads(log: Path) -> list[tuple[str, int]]:
    """The parts that were read so far, in order."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(key, int(start)) for key, start in (line.split() for line in lines)]


def same(source: Path, out: Path) -> bool:
    names = [f"shard-{number}" for number in range(8)]
    return all((source / name).read_bytes() == (out / name).read_bytes() for name in names)


def test_files_come_in_the_order_in_which_they_are_announced(source: Path, tmp_path: Path) -> None:
    out, store = tmp_path / "out", Noted(source, tmp_path / "log")
    out.mkdir()
    announce(out, ["shard-7", "unknown", "shard-2"])
    announce(out, ["shard-5"])
    StoredDataset(store).sync(out, no_progress)
    assert store.keys() == [f"shard-{number}" for number in (5, 7, 2, 0, 1, 3, 4, 6)]
    assert same(source, out)
    assert not (out / ".reads.jsonl").exists()


def test_parts_that_arrive_in_any_order_make_the_file(source: Path, tmp_path: Path) -> None:
    out, store = tmp_path / "out", Noted(source, tmp_path / "log", num_threads=8, pause=0.01)
    StoredDataset(store).sync(out, no_progress)
    assert same(source, out)
    assert len(reads(tmp_path / "log")) == sum(-(-n * 811 // PART) for n in range(8)) + 1
    LocalDataset.open(out, again=True)


def test_bytes_count_as_they_arrive_long_before_their_file_is_complete(
    source: Path, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    store = Noted(source, tmp_path / "log", num_threads=4)
    StoredDataset(store).sync(tmp_path / "out", lambda done, _, size: told.append((done, size)))
    assert sorted(told) == told
    parts = len(reads(tmp_path / "log")) - 1  # one file is empty
    assert len({size for _, size in told} - {0}) == parts
    assert told[-1] == (8, sum(range(8)) * 811)
    told.clear()
    StoredDataset(store).sync(tmp_path / "out", lambda done, _, size: told.append((done, size)))
    assert told[-1] == (8, sum(range(8)) * 811), "what is verified counts as well"


class Gated(Noted):
    """Gives the first file only when it is told to."""

    def __init__(self, folder: Path, log: Path) -> None:
        super().__init__(folder, log)
        self.may_go, self.is_asked = threading.Event(), threading.Event()

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        self.is_asked.set()
        assert self.may_go.wait(60)
        super().read_into(key, start, data)


@pytest.fixture
def gated(source: Path, tmp_path: Path) -> Iterator[Gated]:
    """A store in the middle of a sync into `out`."""
    store, out = Gated(source, tmp_path / "log"), tmp_path / "out"
    with ThreadPoolExecutor() as pool:
        sync = pool.submit(StoredDataset(store).sync, out, no_progress)
        assert store.is_asked.wait(60)
        yield store
        store.may_go.set()
        sync.result()


def test_what_somebody_waits_for_is_fetched_next(gated: Gated, tmp_path: Path) -> None:
    opened = LocalDataset.open(tmp_path / "out", waiting=gated.may_go.set)
    assert opened.file("shard-6").is_file()
    # The first was on its way.
    assert gated.keys()[:2] == ["shard-0", "shard-6"]


def test_what_training_will_read_is_fetched_next(gated: Gated, tmp_path: Path) -> None:
    LocalDataset.open(tmp_path / "out").expect(["shard-4", "shard-3"])
    gated.may_go.set()
    while is_syncing(tmp_path / "out"):
        time.sleep(0.01)
    assert gated.keys()[:4] == ["shard-0", "shard-4", "shard-3", "shard-1"]


def test_a_wrong_file_ends_the_sync_and_leaves_no_part_of_it(source: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "out", source / "shard-6"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"?")
    with pytest.raises(StoreError, match="shard-6 does not match its checksum"):
        StoredDataset(Noted(source, tmp_path / "log", num_threads=4)).sync(out, no_progress)
    assert not (out / "shard-6").exists()
    assert list(out.glob(".*.????????.part")) == []
    path.write_bytes(good)
    for name in ("shard-6", "shard-0"):  # which is empty
        away = (source / name).rename(tmp_path / "away")
        with pytest.raises(UserError, match=f"{name} is in the manifest but missing"):
            StoredDataset(Noted(source, tmp_path / "log")).sync(tmp_path / f"o-{name}", no_progress)
        away.rename(source / name)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_again_and_again_it_fetches_nothing_twice_that_was_in_place(
    source: Path, tmp_path: Path, kills: int
) -> None:
    out, chance = tmp_path / "out", random.Random(kills)
    for number in range(8, 8 + 2 * kills):  # enough to be killed in the middle of
        (source / f"shard-{number}").write_bytes(chance.randbytes(3 * PART))
    LocalDataset.complete(source, "nobody's", {})
    for attempt in range(kills + 1):
        log = tmp_path / f"log-{attempt}"
        store = Noted(source, log, num_threads=3, pause=0.02)
        there = {path.name for path in out.glob("shard-*")}
        process = multiprocessing.get_context("fork").Process(
            target=StoredDataset(store).sync, args=(out, no_progress)
        )
        process.start()
        least = chance.randrange(1, 7)
        while attempt < kills and process.is_alive() and len(reads(log)) < least:
            time.sleep(0.001)
        if attempt < kills:
            process.kill()
        process.join()
        fetched = reads(log)
        assert not there & {name for name, _ in fetched}
        assert len(set(fetched)) == len(fetched)
    assert process.exitcode == 0
    assert same(source, out)
    assert LocalDataset.open(out, again=True).fingerprint == LocalDataset.open(source).fingerprint
    assert [path.name for path in out.iterdir() if path.suffix == ".part"] == []


class Failing(Noted):
    """Fails at the first part of the last file once the others wait for memory."""

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        if (key, start) == ("shard-7", 0):
            time.sleep(0.3)
            raise StoreError("the connection was lost")
        super().read_into(key, start, data)


def test_a_part_that_fails_ends_the_threads_that_wait_for_its_memory(
    source: Path, tmp_path: Path
) -> None:
    """Two threads and one spare buffer: the parts behind the one that fails fill them all."""
    store, out = Failing(source, tmp_path / "log", num_threads=2), tmp_path / "out"
    out.mkdir()
    announce(out, ["shard-7"])
    with pytest.raises(StoreError, match="the connection was lost"):
        StoredDataset(store).sync(out, no_progress)
    assert not list(out.glob("shard-7*"))
