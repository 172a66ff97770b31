"""A worker process of the loader: it makes batches into memory that it shares with the trainer.

It is forked, so it shares the trainer's memory maps; it leaves every signal to the trainer and ends
with it. The memory is one anonymous mapping in slots, each reused once nothing refers to it: it
needs no /dev/shm (64 MB in a container) and takes only what was written.
"""

import mmap
import os
import pickle
import select
import signal
import struct
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import UserError
from training.durable import LocalMemory, Tally
from training.engine.batches import Maker
from training.stacking import ALIGNMENT, ItemLayout
from training.workload import Batch

_SLOT_BYTES = 2**32
# Without this flag Linux counts the entire mapping as taken, not only what is written.
_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
_LOCKED_IN = 2**21  # bytes

# Where a part of a packed batch begins, and its number of bytes.
_Place = tuple[int, int]


class BatchMemory:
    """`num_slots` slots, for this process and those forked from it."""

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
        unlock = LocalMemory.page_lock(array.ctypes.data, size, self._device)
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
        if not obj.numel():
            # Otherwise everything behind an empty view would be pickled.
            return _empty, (obj.dtype, tuple(obj.shape), obj.stride())
        span = 1 + sum((n - 1) * step for n, step in zip(obj.shape, obj.stride(), strict=True))
        values = obj.as_strided((span,), (1,)).view(torch.uint8).numpy()
        return _tensor, (
            pickle.PickleBuffer(values.data),
            obj.dtype,
            tuple(obj.shape),
            obj.stride(),
        )


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
        return Answer(task.number, places=write(maker.collate(items), view, begin))
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
