"""Batches made ahead of the step by worker processes; without workers, on demand.

A batch depends on nothing but (seed, epoch, ids), whichever process makes it, and batches come in
the order of the micro-batches. A batch stays as it is for as long as anything refers to it.
"""

import multiprocessing
import os
import pickle
import selectors
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

import numpy as np
import torch

from training.durable import AttemptEndedError, Tally
from training.engine.batches import Maker, MicroBatch, pinned
from training.engine.loader_worker import Answer, BatchMemory, Task, header_bytes, read, work
from training.settings import LoaderWorkers
from training.stacking import ItemLayout, differing
from training.workload import Batch, Inputs, Samples, Settings

_BATCHES_AHEAD_PER_WORKER = 2
# Batches that may be in use while others are made; any more are copied.
_BATCHES_IN_USE = 64
_TASKS_PER_WORKER = 2  # of one stacked batch


class Loader:
    """Loads the batches of `micro_batches` in order, page-locked if they go to a GPU."""

    def __init__(
        self,
        samples: Samples,
        seed: int,
        micro_batches: Iterable[MicroBatch],
        *,
        num_workers: int,
        device: torch.device,
    ) -> None:
        self.wait_seconds = 0.0  # that the trainer spent waiting for batches or making them
        self.num_workers = num_workers
        self.tally = Tally()  # of the batches that `next` has returned
        maker = Maker(samples, seed)
        self._workers: _Workers | None = None
        if num_workers > 0:
            self._workers = _Workers(maker, iter(micro_batches), num_workers, device, self.tally)
            self._batches: Iterator[Batch] = self._workers
        else:
            made = (self._made(maker, micro) for micro in micro_batches)
            self._batches = made if device.type == "cpu" else (pinned(batch) for batch in made)

    @classmethod
    def of_stage(
        cls,
        samples: Samples,
        micro_batches: Iterable[MicroBatch],
        settings: Settings,
        inputs: Inputs,
    ) -> "Loader":
        """Return a loader for a stage's samples, as its settings ask for."""
        num = num_workers(
            settings.loader_workers,
            device=inputs.device,
            num_threads=inputs.config.num_threads,
            num_ranks=inputs.world,
        )
        return cls(samples, inputs.seed, micro_batches, num_workers=num, device=inputs.device)

    def next(self) -> Batch:
        """Return the next batch, on the CPU."""
        began = time.monotonic()
        batch = next(self._batches)
        self.wait_seconds += time.monotonic() - began
        return batch

    def _made(self, maker: Maker, micro: MicroBatch) -> Batch:
        Tally.taken()
        with Tally.timed("make"):
            batch = maker.batch(micro)
        self.tally.add(Tally.taken())
        return batch

    def taken(self) -> Tally:
        """Return the tally of making batches since the last call, and reset it."""
        made = Tally()
        made.add(self.tally)
        self.tally.seconds.clear()
        self.tally.counts.clear()
        return made

    def close(self) -> None:
        """Stop the workers and discard the batches fetched ahead."""
        if self._workers is not None:
            self._workers.close()


def num_workers(
    wanted: LoaderWorkers, *, device: torch.device, num_threads: int, num_ranks: int
) -> int:
    """Return the worker processes per rank; "auto": its vCPUs minus those it trains with."""
    if wanted != "auto":
        return wanted
    # With a GPU the trainer itself takes one, whatever `num_threads` is (sizing/models/).
    own = num_threads if device.type == "cpu" else 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(0, (usable or 1) // num_ranks - own)


@dataclass(slots=True)
class _Ahead:
    """A batch that was asked for."""

    number: int
    slot: int
    size: int
    num_missing: int  # tasks
    answers: list[Answer]


class _Workers(Iterator[Batch]):
    """Forked processes and the batches that they make, a few ahead.

    All work on one batch if its samples are stacked, else each on a batch of its own: any other
    `collate` is the workload's own code, which does not belong in the trainer's thread.
    """

    def __init__(
        self,
        maker: Maker,
        micro_batches: Iterator[MicroBatch],
        num: int,
        device: torch.device,
        tally: Tally,
    ) -> None:
        self._maker = maker
        self._tally = tally
        self._micro_batches = micro_batches
        self._num_workers = num
        self._num_ahead = _BATCHES_AHEAD_PER_WORKER * num
        self._num_batches = 0
        self._ahead: deque[_Ahead] = deque()
        self._memory = BatchMemory(2 * self._num_ahead + _BATCHES_IN_USE, device)
        self._tasks, self._put = os.pipe()
        # Workers compete for tasks, and the trainer does not wait for room in the pipe.
        os.set_blocking(self._tasks, False)
        os.set_blocking(self._put, False)
        self._unsent: deque[bytes] = deque()
        self._answers: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._selector = selectors.DefaultSelector()
        # Workers do not end by themselves while this process lives, not even while it exits.
        self._end = Finalize(self, _end, (self._processes,), exitpriority=0)
        self._ask()
        for _ in range(num):
            self._fork()

    def __next__(self) -> Batch:
        try:
            return self._next()
        except BaseException:
            # Whoever catches the error may keep it, and with it this object, without closing it.
            self._end()
            raise

    def _next(self) -> Batch:
        self._ask()
        if not self._ahead:
            raise StopIteration
        ahead = self._ahead[0]
        while ahead.num_missing:
            self._receive()
        self._ahead.popleft()
        batch = self._made(ahead)
        self._ask()
        return batch

    def close(self) -> None:
        """End the workers at once: they hold nothing that could be lost."""
        self._end()
        self._selector.close()
        for connection in self._answers:
            connection.close()
        os.close(self._tasks)
        os.close(self._put)
        self._memory.close()

    def _fork(self) -> None:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe(duplex=False)
        self._answers.append(mine)
        process = context.Process(
            target=work,
            args=(self._maker, self._memory, self._tasks, theirs, os.getpid(), self._answers),
            daemon=True,
        )
        process.start()
        theirs.close()
        self._processes.append(process)
        self._selector.register(mine, selectors.EVENT_READ, process)
        self._selector.register(process.sentinel, selectors.EVENT_READ, process)

    def _ask(self) -> None:
        while len(self._ahead) < self._num_ahead:
            micro = next(self._micro_batches, None)
            if micro is None:
                break
            self._ask_for(micro)
        while self._unsent:
            try:
                os.write(self._put, self._unsent[0])
            except BlockingIOError:
                return  # enough for the workers until the next call
            self._unsent.popleft()

    def _ask_for(self, micro: MicroBatch) -> None:
        number, slot, size = self._num_batches, self._memory.take(), len(micro.ids)
        parts = min(size, _TASKS_PER_WORKER * self._num_workers) if self._maker.stacks else 1
        each = -(-size // parts)
        firsts = range(0, size, each)
        self._memory.view(slot)[: 8 * size].view(np.int64)[:] = micro.ids
        for first in firsts:
            count = min(each, size - first)
            task = Task(number, slot, micro.epoch, first, count, size)
            self._unsent.append(task.encode())
        self._num_batches += 1
        self._ahead.append(_Ahead(number, slot, size, len(firsts), []))

    def _receive(self) -> None:
        """Wait for answers; a worker that has ended ends the attempt too."""
        for key, _ in self._selector.select():
            if not isinstance(key.fileobj, Connection):
                raise _lost(key.data)
            try:
                answer: Answer = key.fileobj.recv()
            except (EOFError, OSError):  # in the middle of an answer
                raise _lost(key.data) from None
            ahead = self._ahead[answer.number - self._ahead[0].number]
            ahead.answers.append(answer)
            ahead.num_missing -= 1

    def _made(self, ahead: _Ahead) -> Batch:
        for answer in ahead.answers:
            if answer.error:
                raise pickle.loads(answer.error)
            self._tally.add(answer.tally)
        first, begin = ahead.answers[0], header_bytes(ahead.size)
        if first.places:
            memory = self._memory.hand_out(ahead.slot, sum(first.places[-1]))
            return read(memory, first.places)
        layout: ItemLayout = pickle.loads(first.layout)
        for answer in ahead.answers:
            if answer.layout != first.layout and (other := pickle.loads(answer.layout)) != layout:
                raise differing(layout, other)
        memory = self._memory.hand_out(ahead.slot, begin + layout.num_bytes(ahead.size))
        # Not torch's frombuffer, which refuses samples without any bytes.
        values = torch.from_numpy(np.frombuffer(memory, np.uint8, offset=begin))
        return layout.batch(layout.columns(values, ahead.size))


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _lost(process: BaseProcess) -> AttemptEndedError:
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return AttemptEndedError(
        f"loader worker {process.pid} {how}, perhaps because memory ran out or in a library that "
        "`get` calls; the next attempt resumes from the last commit"
    )
