"""A batch depends on seed, epoch and ids alone, and workers leave every signal to the trainer."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.runs import Run
from training.engine.batches import MicroBatch
from training.engine.loader import Loader
from training.interruption.notice import Interruption
from training.randomness import derive_seed, derive_seeds


class Augmented:
    """Samples with randomness, whose last bits depend on the number of threads."""

    def __init__(self) -> None:
        self.table = torch.linspace(0, 1, 60_000).reshape(10, 6000)

    def __len__(self) -> int:
        return 10

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        return self.table[index] + torch.rand(6000, generator=rng), os.getpid()

    def collate(self, items: Sequence[Any]) -> Any:
        return {"x": torch.stack([x for x, _ in items]).sum(), "pids": [pid for _, pid in items]}

    def order(self, epoch: int, seed: int) -> Sequence[int]:
        return range(10)


MICRO_BATCHES = [
    MicroBatch(number=0, epoch=epoch, ids=(first, first + 1))
    for epoch in range(2)
    for first in range(0, 10, 2)
]


def batches(num_workers: int, first: int = 0) -> list[tuple[Tensor, int]]:
    micro_batches = MICRO_BATCHES[first:]
    loader = Loader(Augmented(), 7, micro_batches, num_workers=num_workers, pin_memory=False)
    made = [loader.next() for _ in micro_batches]
    loader.close()
    return [(batch["x"], batch["pids"][0]) for batch in made]


def test_batches_depend_neither_on_workers_nor_on_where_the_loader_begins() -> None:
    torch.set_num_threads(2)
    try:
        alone, shared, late = batches(0), batches(2), batches(1, first=4)
    finally:
        torch.set_num_threads(1)
    assert [x for x, _ in alone] == [x for x, _ in shared]
    assert [x for x, _ in alone[4:]] == [x for x, _ in late]
    assert len({float(x) for x, _ in alone}) == 10, "each epoch is augmented differently"
    assert {pid for _, pid in alone} == {os.getpid()}
    assert len({pid for _, pid in shared}) == 2


def test_seeds_of_samples_are_derived_like_every_other() -> None:
    derive = derive_seeds("sample", 7, 3)
    assert [derive(index) for index in (0, 5, 123)] == [
        derive_seed("sample", 7, 3, index) for index in (0, 5, 123)
    ]


def test_workers_ignore_what_is_meant_for_the_trainer() -> None:
    interruption = Interruption(budget_seconds=120)
    interruption.listen()
    try:
        loader = Loader(Augmented(), 7, MICRO_BATCHES, num_workers=1, pin_memory=False)
        worker = loader.next()["pids"][0]
        (process,) = loader._batches._workers  # type: ignore[attr-defined]
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            os.kill(worker, number)
        assert len([loader.next() for _ in MICRO_BATCHES[1:]]) == 9
        assert not interruption.wait(0.2), "a worker's signal is no notice to the trainer"
        loader.close()
        assert process.exitcode == 0, "it ends by itself, and is not killed after a timeout"
    finally:
        interruption.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_a_run_with_workers_equals_the_one_without(run: Run, whole: Run) -> None:
    assert run.attempt("--override=loader_workers=2") == 0
    assert run.head.weights_sha256 == whole.head.weights_sha256
    assert run.losses() == whole.losses()
    assert all(0 <= line["data_wait"] <= 1 for line in run.lines("step"))
