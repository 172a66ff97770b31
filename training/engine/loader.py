"""Batches made ahead of the step by worker processes; without workers, on demand.

A batch depends on nothing but (seed, epoch, ids), whichever process makes it, and batches come in
the order of the micro-batches. A batch stays as it is for as long as anything refers to it. Workers
are forked, so they share the trainer's memory maps; they leave every signal to it, and end with it.
"""

import mmap
import multiprocessing
import os
import pickle
import select
import selectors
import signal
import struct
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import UserError
from training.durable import AttemptEndedError, Tally, page_lock
from training.engine.batches import Maker, MicroBatch, pinned
from training.settings import LoaderWorkers
from training.stacking import ALIGNMENT, ItemLayout, differing
from training.workload import Batch, Inputs, Samples, Settings

_SLOT_BYTES = 2**32
# Without this flag Linux counts the entire mapping as taken, not only what is written.
_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
_LOCKED_IN = 2**21  # bytes

# Where a part of a packed batch begins, and its number of bytes.
_Place = tuple[int, int]


class BatchMemory:
    """One anonymous mapping in `num_slots` slots, shared with the processes forked from this one.

    It needs no /dev/shm (64 MB in a container) and takes only what was written.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._mapping = mmap.mmap(-1, num_slots * _SLOT_BYTES, flags=flags)
        except OSError as error:
            raise UserError(
                f"loader workers need {num_slots * _SLOT_BYTES >> 30} GiB of address space, not "
                f"memory, which this system refuses ({error.strerror}): lift `ulimit -v` or "
                "vm.overcommit_memory=2, or set loader_workers to 0"
            ) from error
        self._device = device
        # The last slot freed is taken first: the fewer are in use, the less memory they take.
        self._free = list(reversed(range(num_slots)))
        self._dropped: deque[int] = deque()  # by any thread that let go of a batch
        self._read_until: deque[tuple[torch.cuda.Event, list[int]]] = deque()
        self._locked: dict[int, tuple[int, Callable[[], None] | None]] = {}
        self._is_lock_refused = False

    def view(self, slot: int) -> NDArray[np.uint8]:
        """All bytes of a slot."""
        offset = slot * _SLOT_BYTES
        return np.frombuffer(self._mapping, np.uint8, count=_SLOT_BYTES, offset=offset)

    def take(self) -> int:
        """Take a free slot to write to; there must be one."""
        self._collect()
        return self._free.pop()

    def hand_out(self, slot: int, size: int) -> memoryview:
        """Return the first `size` bytes of a slot, which is free again once nothing refers to them.

        Tensors and arrays made from them count, whoever keeps them. If so many are kept that no
        slot is left, return a copy.
        """
        self._collect()
        array = self.view(slot)[:size]
        if not self._free:
            self._free.append(slot)
            # Not numpy's copy, which is not aligned as tensors are.
            return torch.from_numpy(array).clone().numpy().data
        if self._device.type == "cuda":
            self._lock(slot, array)
        weakref.finalize(array, self._dropped.append, slot).atexit = False
        return array.data

    def close(self) -> None:
        """Let go of page-locked memory; batches handed out stay valid."""
        if self._locked:
            torch.cuda.current_stream(self._device).synchronize()
        for _, unlock in self._locked.values():
            if unlock is not None:
                unlock()
        self._locked.clear()

    def _collect(self) -> None:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if self._device.type != "cuda":
            self._free += dropped
            return
        if dropped:
            # The device may still copy from them, but no longer than until this event.
            event = torch.cuda.current_stream(self._device).record_event()
            self._read_until.append((event, dropped))
        while self._read_until and self._read_until[0][0].query():  # type: ignore[no-untyped-call]
            self._free += self._read_until.popleft()[1]

    def _lock(self, slot: int, array: NDArray[np.uint8]) -> None:
        """Page-lock what a batch uses, once, so that the device copies it by itself."""
        size, unlock = self._locked.get(slot, (0, None))
        if size >= len(array) or self._is_lock_refused:
            return
        if unlock is not None:
            unlock()
        size = -(-len(array) // _LOCKED_IN) * _LOCKED_IN
        unlock = page_lock(array.ctypes.data, size, self._device)
        self._is_lock_refused = unlock is None
        self._locked[slot] = (size, unlock)


def write(batch: Batch, memory: NDArray[np.uint8], first: int) -> list[_Place]:
    """Write any batch from `first` on; return where its parts are.

    Tensors keep strides and alignment, and with them the bits of what is computed from them.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(batch)
    parts = [np.frombuffer(stream.getbuffer(), np.uint8)]
    parts += [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    places = []
    for part in parts:
        first += (part.ctypes.data - first) % ALIGNMENT
        _refuse_too_large(first + len(part))
        memory[first : first + len(part)] = part
        places.append((first, len(part)))
        first += len(part)
    return places


def read(memory: memoryview, places: Sequence[_Place]) -> Batch:
    """Return the batch that `write` wrote, without copying it."""
    data, *buffers = (memory[first : first + size] for first, size in places)
    # Torch 2.12 warns of sparse tensors that it unpickles, unless these checks are off by name.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return pickle.loads(data, buffers=buffers)


def _refuse_too_large(size: int) -> None:
    """Refuse a batch that no slot can hold."""
    if size > _SLOT_BYTES:
        raise UserError(
            f"a micro-batch of {size / 2**30:.1f} GiB is too large for loader workers, which make "
            f"at most {_SLOT_BYTES / 2**30:.0f} GiB; use a smaller micro_batch, or set "
            "loader_workers to 0"
        )


class _Pickler(pickle.Pickler):
    """Leaves the values of plain tensors outside of the pickle, as numpy does for its arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented
        layout = obj.dtype, tuple(obj.shape), obj.stride()
        if not obj.numel():
            # Otherwise everything behind an empty view would be pickled.
            return _empty, layout
        span = 1 + sum((n - 1) * step for n, step in zip(obj.shape, obj.stride(), strict=True))
        values = obj.as_strided((span,), (1,)).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(values.data), *layout)


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return is_dense and not is_lazy and not tensor.requires_grad


def _empty(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def _tensor(
    values: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.frombuffer(values, dtype=dtype).as_strided(shape, stride)


_TASK = struct.Struct("6q")
_PAGE = 4096
# How soon a worker notices that the trainer was killed, while it has nothing to do.
_IDLE_MILLISECONDS = 1000


@dataclass(frozen=True, slots=True)
class Task:
    """Rows `first` to `first + count` of a batch, whose ids are at the beginning of its slot."""

    number: int  # of the batch, counted from 0
    slot: int
    epoch: int
    first: int
    count: int
    batch_size: int

    def encode(self) -> bytes:
        """Encode the task, short enough for several processes to read from one pipe."""
        return _TASK.pack(*astuple(self))


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a task."""

    number: int
    layout: bytes = b""  # of the stacked samples, pickled
    places: Sequence[_Place] = ()  # of the parts of a batch that one worker made
    error: bytes = b""  # a pickled exception
    tally: Tally = field(default_factory=Tally)  # of making it


def header_bytes(batch_size: int) -> int:
    """Return the size of a slot's beginning, which holds the ids."""
    return -(-8 * batch_size // _PAGE) * _PAGE


def work(
    maker: Maker,
    memory: BatchMemory,
    tasks: int,
    answers: Connection,
    trainer: int,
    of_the_trainer: Sequence[Connection],
) -> None:
    """Do tasks until the trainer ends; it kills its workers when it no longer needs them."""
    # Otherwise a worker could not tell that nobody reads its answers any more.
    for connection in of_the_trainer:
        connection.close()
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
            Tally.taken()
            with Tally.timed("make"):
                answer = _done(task, maker, memory)
            answer = replace(answer, tally=Tally.taken())
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
        batch = maker.collate(items, task.epoch, int(ids[0]))
        return Answer(task.number, places=write(batch, view, begin))
    layout = ItemLayout.of(items[0])
    size = layout.num_bytes(task.batch_size)
    _refuse_too_large(begin + size)
    values = torch.from_numpy(view[begin : begin + size])
    layout.write(layout.columns(values, task.batch_size), task.first, items)
    return Answer(task.number, layout=pickle.dumps(layout))


def _pickled(error: BaseException) -> bytes:
    """Pickle the exception with its traceback, otherwise lost, as a note."""
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
