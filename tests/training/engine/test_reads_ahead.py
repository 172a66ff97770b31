"""What a sync is told: the files that training will read, from its exact position on."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training.hooks import interrupt_at
from tests.training.runs import Run, ended
from tests.training.tiny import Rows
from training.durable.store.local_dataset import LocalDataset
from training.numerics import shuffled
from training.workload import Order

# Of the tiny workload: 42 rows are made, and 12 are for validation.
NUM_ROWS, SEED, BATCH = 30, 7, 8


class RowsInFiles(Rows):
    """Each row is in a file of its own."""

    def files(self, indices: Order) -> Sequence[str]:
        return [f"file-{int(index)}" for index in indices]


def test_a_resumed_run_announces_the_rest_of_its_epoch_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[list[str]]()
    monkeypatch.setattr("tests.training.tiny.Rows", RowsInFiles)
    monkeypatch.setattr(LocalDataset, "expect", lambda self, names: told.append(list(names)))
    interrupt_at("first", 2)
    assert run.attempt() == 75
    (checkpoint,) = run.head.checkpoints[-1:]
    assert run.attempt() == 0
    order = [f"file-{int(index)}" for index in shuffled(NUM_ROWS, 0, SEED)]
    assert told[0] == order
    assert 0 < checkpoint.step * BATCH < NUM_ROWS
    assert told[1] == order[checkpoint.step * BATCH :]


def test_each_host_tells_its_own_sync(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tell(dataset: LocalDataset, names: Sequence[str]) -> None:
        tmp_path.joinpath(os.environ["TEST_HOST"]).write_text(" ".join(names))

    monkeypatch.setattr("tests.training.tiny.Rows", RowsInFiles)
    monkeypatch.setattr(LocalDataset, "expect", tell)
    interrupt_at("first", 2)
    assert ended(run.fork_hosts(2)) == [75, 75]
    told = [tmp_path.joinpath(name).read_text() for name in ("127.0.0.1", "127.0.0.2")]
    assert told[0] == told[1] and len(told[0].split()) == NUM_ROWS


def test_a_run_that_only_has_to_be_evaluated_asks_for_no_other_epoch(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A curriculum may have no order for an epoch after the last one."""

    class Ordered(RowsInFiles):
        def order(self, epoch: int, seed: int) -> Order:
            assert epoch == 0
            return shuffled(NUM_ROWS, epoch, seed)

    monkeypatch.setattr("tests.training.tiny.Rows", Ordered)
    monkeypatch.setattr(LocalDataset, "expect", lambda self, names: None)
    run.options = ["--override=epochs=1"]
    interrupt_at("first", 3)
    assert run.attempt() == 75
    assert run.attempt() == 0
