"""A dataset that is used while a sync is still filling its folder."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from contract.errors import UserError
from tests.training.runs import Run
from training.durable.store.dataset import StoredDataset
from training.durable.store.folder import FolderStore, open_store
from training.durable.store.local_dataset import ARRIVING, LocalDataset, is_syncing, no_progress
from training.durable.store.protocol import StoreError


class Slow(FolderStore):
    """A store that gives each file only when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_go = {name: threading.Event() for name in ("x.safetensors", "notes/about.txt")}

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        assert self.may_go[key].wait(20)
        super().read_into(key, start, data)

    def let_all_go(self) -> None:
        """Give every file."""
        for event in self.may_go.values():
            event.set()


@pytest.fixture
def arriving(dataset: Path, tmp_path: Path) -> Iterator[tuple[Slow, LocalDataset]]:
    """A slow store, and the dataset while it is synced from there by a thread."""
    store, out = Slow(dataset), tmp_path / "out"
    with ThreadPoolExecutor() as pool:
        sync = pool.submit(StoredDataset(store).sync, out, no_progress)
        wait_for_sync(out)
        yield store, LocalDataset.open(out)
        store.let_all_go()
        sync.result()


@pytest.fixture
def sync(dataset: Path, tmp_path: Path) -> Iterator[ForkProcess]:
    """A process that syncs the dataset, and gets no file until it is killed."""
    out = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(
        target=StoredDataset(Slow(dataset)).sync, args=(out, no_progress)
    )
    process.start()
    wait_for_sync(out)
    yield process
    process.kill()
    process.join()


def wait_for_sync(out: Path) -> None:
    """Wait until a sync has begun to fill the folder."""
    while not is_syncing(out):
        time.sleep(0.01)


def test_a_file_can_be_used_before_the_sync_ends(arriving: tuple[Slow, LocalDataset]) -> None:
    store, dataset = arriving
    store.may_go["notes/about.txt"].set()
    assert dataset.file("notes/about.txt").read_text() == "42 rows\n"
    assert dataset.is_arriving
    threading.Timer(0.3, store.may_go["x.safetensors"].set).start()
    assert (dataset.folder / "x.safetensors").is_file(), "the folder is given when it is whole"
    with pytest.raises(UserError, match=r"no file 'y' in its manifest\.json"):
        dataset.file("y")


def test_a_run_trains_while_files_that_it_does_not_read_are_still_arriving(
    arriving: tuple[Slow, LocalDataset], run: Run, whole: Run, tmp_path: Path
) -> None:
    store, dataset = arriving
    threading.Timer(0.5, store.may_go["x.safetensors"].set).start()
    run.dataset = tmp_path / "out"
    assert run.attempt() == 0
    assert run.losses() == whole.losses()
    assert dataset.is_arriving


def test_who_waits_for_a_file_is_told_when_the_sync_ends_without_it(
    sync: ForkProcess, tmp_path: Path
) -> None:
    opened = LocalDataset.open(tmp_path / "out", waiting=sync.kill)
    with pytest.raises(StoreError, match=r"ended without x\.safetensors; sync it again"):
        opened.file("x.safetensors")
    sync.join()
    # Not the user's mistake: a machine syncs it again.
    with pytest.raises(StoreError, match=r"was interrupted; sync it again"):
        LocalDataset.open(tmp_path / "out")


def test_who_waits_has_patience_with_a_sync_that_is_tried_again(
    sync: ForkProcess, dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    opened = LocalDataset.open(out, waiting=sync.kill, patience_seconds=60)
    again = threading.Timer(1, StoredDataset(open_store(str(dataset))).sync, (out, no_progress))
    again.start()
    assert opened.file("x.safetensors").is_file()
    again.join()


def test_who_opens_a_dataset_between_two_attempts_of_its_sync_has_patience_too(
    dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ARRIVING).write_bytes((dataset / "manifest.json").read_bytes())
    begun = list[threading.Timer]()

    def again() -> None:
        if not begun:
            sync = StoredDataset(open_store(str(dataset))).sync
            begun.append(threading.Timer(0.1, sync, (out, no_progress)))
            begun[0].start()

    opened = LocalDataset.open(out, waiting=again, patience_seconds=60)
    assert opened.file("x.safetensors").is_file()
    begun[0].join()


def test_who_checks_a_dataset_waits_for_the_end_of_its_sync(
    arriving: tuple[Slow, LocalDataset], tmp_path: Path
) -> None:
    store, _ = arriving
    opened = LocalDataset.open(tmp_path / "out", again=True, waiting=store.let_all_go)
    assert not opened.is_arriving


def test_a_sync_that_cannot_record_what_it_verified_is_waited_for(
    dataset: Path, tmp_path: Path
) -> None:
    store, out = Slow(dataset), tmp_path / "out"
    (out / ".verified.jsonl").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        sync = pool.submit(StoredDataset(store).sync, out, no_progress)
        wait_for_sync(out)
        opened = LocalDataset.open(out)
        store.let_all_go()
        assert (opened.folder / "x.safetensors").is_file()
        sync.result()
