"""Makes batches, and what a worker process of the loader does: it makes them into shared memory.

Forked, so that it shares the trainer's memory maps; it leaves every signal to the trainer, and ends
with it.
"""

import os
import pickle
import select
import signal
import struct
import traceback
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from training.engine.batch_memory import BatchMemory, Place, refuse_too_large, write
from training.engine.batches import MicroBatch
from training.randomness import derive_seeds
from training.stacking import ItemLayout, stack
from training.tally import Tally, taken, timed
from training.workload import Batch, Samples, implements

_TASK = struct.Struct("6q")
_PAGE = 4096
# How soon a worker notices that the trainer was killed, while it has nothing to do.
_IDLE_MILLISECONDS = 1000


class Maker:
    """Makes samples and batches, which depend on nothing but seed, epoch and index."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._rng = torch.Generator()
        # Then each row of a batch can be made on its own.
        self.stacks = samples.collate is stack or not implements(samples, Samples.collate)

    def batch(self, micro: MicroBatch) -> Batch:
        """A whole micro-batch, made with one thread, as in a worker."""
        num_threads = torch.get_num_threads()
        if num_threads != 1:
            # The number of threads can change the bits of a sample.
            torch.set_num_threads(1)
        try:
            return self.collate(self.items(micro.epoch, micro.ids))
        finally:
            if num_threads != 1:
                torch.set_num_threads(num_threads)

    def items(self, epoch: int, ids: Sequence[int]) -> list[Any]:
        """Samples of an epoch."""
        derive = derive_seeds("sample", self._seed, epoch)
        return [self._get(index, epoch, derive(index)) for index in ids]

    def collate(self, items: Sequence[Any]) -> Batch:
        """The workload's own way to combine samples."""
        return self._samples.collate(items)

    def _get(self, index: int, epoch: int, seed: int) -> Any:
        self._rng.manual_seed(seed)
        return self._samples.get(index, epoch, self._rng)


@dataclass(frozen=True, slots=True)
class Task:
    """Rows `first` to `first + count` of a batch, whose ids stand at the beginning of its slot."""

    number: int  # of the batch, counted from 0
    slot: int
    epoch: int
    first: int
    count: int
    batch_size: int

    def encode(self) -> bytes:
        """Short enough that several processes can read from one pipe."""
        return _TASK.pack(*astuple(self))


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a task."""

    number: int
    layout: bytes = b""  # of the stacked samples, pickled
    places: Sequence[Place] = ()  # where the parts of a batch are that was made whole
    error: bytes = b""  # a pickled exception
    tally: Tally = field(default_factory=Tally)  # of making it


def header_bytes(batch_size: int) -> int:
    """The beginning of a slot, with the ids."""
    return -(-8 * batch_size // _PAGE) * _PAGE


def work(maker: Maker, memory: BatchMemory, tasks: int, answers: Connection, trainer: int) -> None:
    """Do tasks until the trainer ends; it kills its workers when it needs them no more."""
    _leave_signals_to_the_trainer()
    torch.set_num_threads(1)
    waiting = select.poll()
    waiting.register(tasks, select.POLLIN)
    while os.getppid() == trainer:
        if not waiting.poll(_IDLE_MILLISECONDS):
            continue
        try:
            task = Task(*_TASK.unpack(os.read(tasks, _TASK.size)))
        except BlockingIOError:
            continue  # another worker was faster
        try:
            taken()
            with timed("make"):
                answer = _done(task, maker, memory)
            answer = replace(answer, tally=taken())
        except BaseException as error:  # whatever the workload raises, the trainer raises it
            answer = Answer(task.number, error=_pickled(error))
        try:
            answers.send(answer)
        except BrokenPipeError:
            return


def _done(task: Task, maker: Maker, memory: BatchMemory) -> Answer:
    view, begin = memory.view(task.slot), header_bytes(task.batch_size)
    ids = view[: 8 * task.batch_size].view(np.int64)[task.first : task.first + task.count]
    items = maker.items(task.epoch, ids.tolist())
    if not maker.stacks:
        return Answer(task.number, places=write(maker.collate(items), view, begin))
    layout = ItemLayout.of(items[0])
    size = layout.num_bytes(task.batch_size)
    refuse_too_large(begin + size)
    values = torch.from_numpy(view[begin : begin + size])
    layout.write(layout.columns(values, task.batch_size), task.first, items)
    return Answer(task.number, layout=pickle.dumps(layout))


def _pickled(error: BaseException) -> bytes:
    """The exception with its traceback, which is lost otherwise, as a note."""
    text = "In a loader worker:\n" + "".join(traceback.format_exception(error))
    try:
        error.add_note(text)
        sent = pickle.dumps(error)
        pickle.loads(sent)
    except BaseException:  # it runs the exception's own code, which may do anything
        return pickle.dumps(RuntimeError(text))
    return sent


def _leave_signals_to_the_trainer() -> None:
    """Ignore a notice or Ctrl-C, sent to the whole process group: workers run until the save."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
