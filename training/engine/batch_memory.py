"""Memory for batches that worker processes write, in slots used again when nothing refers to them.

It is one anonymous mapping made before the fork, so it needs no /dev/shm (64 MB in a container),
and takes memory only for what was written: as many slots as were in use, each of the largest batch.
"""

import mmap
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.errors import UserError
from training.save.memory import page_lock
from training.stacking import ALIGNMENT
from training.workload import Batch

_SLOT_BYTES = 2**32
# Without it Linux counts the whole mapping, not only what is written, as taken.
_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
_LOCKED_IN = 2**21  # bytes

# Where a part of a packed batch begins, and its number of bytes.
Place = tuple[int, int]


class BatchMemory:
    """`num_slots` slots, for this process and those forked from it."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._mapping = mmap.mmap(-1, num_slots * _SLOT_BYTES, flags=flags)
        except OSError as error:
            raise UserError(
                f"loader workers need {num_slots * _SLOT_BYTES >> 30} GiB of addresses, not "
                f"memory, which this system refuses ({error.strerror}): lift `ulimit -v` or "
                "vm.overcommit_memory=2, or give 0 loader_workers"
            ) from error
        self._device = device
        # The last one freed is taken first: the fewer slots are used, the less memory.
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
        """A slot to write to; there must be one."""
        self._collect()
        return self._free.pop()

    def hand_out(self, slot: int, size: int) -> memoryview:
        """The first `size` bytes of a slot, which is free again when nothing refers to them.

        Tensors and arrays made of them refer to them, whoever keeps them. If others keep so many
        that no slot is left, it is a copy.
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


def write(batch: Batch, memory: NDArray[np.uint8], first: int) -> list[Place]:
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
        refuse_too_large(first + len(part))
        memory[first : first + len(part)] = part
        places.append((first, len(part)))
        first += len(part)
    return places


def read(memory: memoryview, places: Sequence[Place]) -> Batch:
    """The batch that `write` wrote, in the same memory."""
    data, *buffers = (memory[first : first + size] for first, size in places)
    # Torch 2.12 warns of sparse tensors that it unpickles, unless these checks are off by name.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return pickle.loads(data, buffers=buffers)


def refuse_too_large(size: int) -> None:
    """Refuse a batch that no slot can hold."""
    if size > _SLOT_BYTES:
        raise UserError(
            f"a micro-batch of {size / 2**30:.1f} GiB is too large for loader workers, which make "
            f"at most {_SLOT_BYTES / 2**30:.0f} GiB; take a smaller micro_batch, or 0 "
            "loader_workers"
        )


class _Pickler(pickle.Pickler):
    """Leaves the values of plain tensors outside of the pickle, as numpy does for its arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented
        if not obj.numel():
            # Else all that it is an empty view of would be pickled.
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
