"""Batches fetched and collated ahead of the step by worker processes; 0 workers: when asked.

A batch depends on nothing but (seed, epoch, ids), whoever makes it. Workers are forked: they share
the memory maps of the trainer, and they leave every signal to it.
"""

import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from training.engine.batches import MicroBatch
from training.randomness import derive_seeds
from training.workload import Batch, Samples

_BATCHES_AHEAD_PER_WORKER = 2


class Loader:
    """Gives the batches of `micro_batches` in order."""

    def __init__(
        self,
        samples: Samples,
        seed: int,
        micro_batches: Iterable[MicroBatch],
        *,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self.wait_seconds = 0.0  # for which the trainer has waited, or made batches itself
        batches = _Batches(samples, seed)
        if num_workers == 0:
            # Not by a DataLoader: its hooks for profilers cost a tenth of a millisecond a batch.
            self._batches: Iterator[Batch] = (batches[micro] for micro in micro_batches)
            return
        self._batches = iter(
            DataLoader(
                batches,
                batch_size=None,  # an item is a whole micro-batch
                sampler=micro_batches,
                collate_fn=_as_it_is,
                num_workers=num_workers,
                prefetch_factor=_BATCHES_AHEAD_PER_WORKER,
                pin_memory=pin_memory,
                multiprocessing_context=multiprocessing.get_context("fork"),
                worker_init_fn=_leave_signals_to_the_trainer,
                # Its own, so that the model's noise does not depend on when a loader is made.
                generator=torch.Generator(),
            )
        )

    def next(self) -> Batch:
        """The next batch, on the CPU."""
        began = time.monotonic()
        batch = next(self._batches)
        self.wait_seconds += time.monotonic() - began
        return batch

    def close(self) -> None:
        """End the workers; what they have fetched ahead is thrown away."""
        del self._batches


class _Batches(Dataset[Batch]):
    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._rng = torch.Generator()

    def __getitem__(self, micro: MicroBatch) -> Batch:
        num_threads = torch.get_num_threads()
        if num_threads != 1:
            # As in a worker: the number of threads can change the bits of a sample.
            torch.set_num_threads(1)
        try:
            derive = derive_seeds("sample", self._seed, micro.epoch)
            return self._samples.collate([self._get(index, derive(index)) for index in micro.ids])
        finally:
            if num_threads != 1:
                torch.set_num_threads(num_threads)

    def _get(self, index: int, seed: int) -> Any:
        self._rng.manual_seed(seed)
        return self._samples.get(index, self._rng)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _leave_signals_to_the_trainer(worker: int) -> None:
    """A notice or Ctrl-C reaches whole process groups; workers end when the trainer has saved."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # The loader ends its workers with it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
