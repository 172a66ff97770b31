"""Batches fetched and collated ahead of the step by worker processes; without workers, on demand.

A batch depends on nothing but (seed, epoch, ids), whichever process makes it. Workers are forked:
they share the trainer's memory maps, and leave every signal to it.
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
    """Loads the batches of `micro_batches` in order."""

    def __init__(
        self,
        samples: Samples,
        seed: int,
        micro_batches: Iterable[MicroBatch],
        *,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self.wait_seconds = 0.0  # that the trainer spent waiting for batches or making them
        batches = _Batches(samples, seed)
        if num_workers == 0:
            # Not a DataLoader: its profiler hooks cost a tenth of a millisecond per batch.
            self._batches: Iterator[Batch] = (batches[micro] for micro in micro_batches)
            return
        self._batches = iter(
            DataLoader(
                batches,
                batch_size=None,  # an item is a whole micro-batch
                sampler=micro_batches,
                collate_fn=_identity,
                num_workers=num_workers,
                prefetch_factor=_BATCHES_AHEAD_PER_WORKER,
                pin_memory=pin_memory,
                multiprocessing_context=multiprocessing.get_context("fork"),
                worker_init_fn=_leave_signals_to_the_trainer,
                # Its own, so that making a loader does not advance the model's random state.
                generator=torch.Generator(),
            )
        )

    def next(self) -> Batch:
        """Return the next batch, on the CPU."""
        began = time.monotonic()
        batch = next(self._batches)
        self.wait_seconds += time.monotonic() - began
        return batch

    def close(self) -> None:
        """Stop the workers and discard the batches fetched ahead."""
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
            return self._samples.collate(
                [self._get(index, micro.epoch, derive(index)) for index in micro.ids]
            )
        finally:
            if num_threads != 1:
                torch.set_num_threads(num_threads)

    def _get(self, index: int, epoch: int, seed: int) -> Any:
        self._rng.manual_seed(seed)
        return self._samples.get(index, epoch, self._rng)


def _identity(batch: Batch) -> Batch:
    return batch


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Ignore a notice or Ctrl-C, sent to the whole process group: workers run until the save."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # The loader stops its workers with SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
