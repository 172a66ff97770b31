"""Seconds and memory of an epoch's bookkeeping: which samples each step takes, without any sample.

The order with its checks, every step's micro-batches in the loop and in the loader, and a digest of
every step's ids, in a process of its own.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from training.engine.batches import BatchPlan
from training.randomness import shuffled
from training.record.sample_digest import sample_digest
from training.workload import Order, Settings


class _Numbers:
    """Samples of which only the number matters."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def get(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def collate(self, items: Sequence[Any]) -> Any:
        raise NotImplementedError

    def order(self, epoch: int, seed: int) -> Order:
        return shuffled(self._count, epoch, seed)


def measure(*, samples: int, batch: int) -> list[dict[str, Any]]:
    """Return one row."""
    if samples < batch:
        raise ValueError(f"give at least one batch of {batch} samples, got {samples}")
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_send, args=(theirs, samples, batch)
    )
    process.start()
    row: dict[str, Any] = mine.recv()
    process.join()
    return [row]


def _send(there: Connection, samples: int, batch: int) -> None:
    there.send(_row(samples, batch))


def _row(samples: int, batch: int) -> dict[str, Any]:
    settings = Settings(epochs=1, global_batch=batch, micro_batch=batch)
    _walk(BatchPlan(_Numbers(2 * batch), settings, 0, 1))  # what is imported on the way
    before, began = _peak_kib(), time.process_time()
    plan = BatchPlan(_Numbers(samples), settings, 0, 1)
    plan.ids(0)
    ordered = time.process_time() - began
    _walk(plan)
    return {
        "samples": samples,
        "steps": plan.num_steps,
        "order and checks, CPU s": ordered,
        "whole epoch, CPU s": time.process_time() - began,
        "MiB": (_peak_kib() - before) / 1024,
    }


def _walk(plan: BatchPlan) -> None:
    ahead = plan.shares(0, 0)
    for step in range(plan.num_steps):
        if plan.share(step, 0) != [next(ahead)]:
            raise RuntimeError(f"step {step}: the loader's ids are not the loop's")
        sample_digest(plan.ids(step), plan.num_samples)


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
