"""The state of a step boundary: its tensors, the safetensors files that they become, and copies.

The library can only write an entire file from copies of its tensors. Here the header and every
tensor's position follow from shapes alone, so that parts of a file can be made, sent and read in
any order and in little memory: straight from the live tensors, or from a `HostCopy`, which lets
training continue. https://github.com/huggingface/safetensors#format
"""

import bisect
import itertools
import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import Tensor

from contract.errors import UserError
from contract.keys import checkpoint_prefix
from training.durable.errors import DivergedError, Divergence
from training.durable.record.head import step_of
from training.durable.save.tensors.memory import allocate, available_bytes, open_shared, view_of
from training.durable.store.protocol import PartSender, Store
from training.durable.store.transfer import Contents, FileEntry, Spare, TransferProgress, send

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = dict(zip(_CODES.values(), _CODES, strict=True))
# The alignment of the data: the largest item of any type, and enough for vector instructions.
_ALIGNMENT = 64
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpan:
    """The position of one tensor's bytes in the file, from `start` to before `stop`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """The layout of a file: its header, and the positions of its tensors, without gaps."""

    header: bytes
    spans: tuple[TensorSpan, ...]

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.spans[-1].stop if self.spans else len(self.header)

    def overlapping(self, start: int, stop: int) -> Iterator[TensorSpan]:
        """Yield the tensors with a byte from `start` to before `stop`."""
        first = bisect.bisect_right(self.spans, start, key=lambda place: place.stop)
        for place in itertools.islice(self.spans, first, None):
            if place.start >= stop:
                return
            if place.start < place.stop:
                yield place


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Lay out the tensors; those with large items first, so that each is aligned to its items."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    record: dict[str, object] = {}
    stop = 0
    for name, tensor in ordered:
        is_plain = tensor.layout == torch.strided and not hasattr(tensor, "__tensor_flatten__")
        if tensor.dtype not in _CODES or not is_plain:
            raise UserError(
                f"{name} is a {tensor.layout} {type(tensor).__name__} of {tensor.dtype}, which no "
                "checkpoint can hold; use another type, or persistent=False to leave a buffer out"
            )
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        record[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
    about = {} if metadata is None else {"__metadata__": dict(metadata)}
    text = json.dumps({**about, **record}, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return FileLayout(header=header, spans=_spans(record, len(header)))


def header_bytes(first: bytes, size: int) -> int:
    """Return the header's size in a file of `size` bytes that starts with `first` (8 or more)."""
    length = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")
    if len(first) < _LENGTH_BYTES or length > size:
        raise ValueError(f"a header of {length} bytes does not fit into {size} bytes")
    return length


def parse_header(header: bytes, size: int) -> FileLayout:
    """Parse the header of a file of `size` bytes; ValueError if it does not fit the file."""
    try:
        record = json.loads(header[_LENGTH_BYTES:])
        record.pop("__metadata__", None)
        places = _spans(record, len(header))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"invalid header: {error}") from error
    stop = len(header)
    for place in places:
        count = math.prod(place.shape)
        if place.start != stop or place.stop - place.start != count * place.dtype.itemsize:
            raise ValueError(f"the header has an impossible position for {place.name!r}")
        stop = place.stop
    if stop != size:
        raise ValueError(f"the header describes {stop} bytes of {size}")
    return FileLayout(header=header, spans=places)


def _spans(record: Mapping[str, object], base: int) -> tuple[TensorSpan, ...]:
    places = []
    for name, about in record.items():
        dtype, shape, offsets = (about[key] for key in ("dtype", "shape", "data_offsets"))  # type: ignore[index]
        start, stop = (base + int(offset) for offset in offsets)
        shape = tuple(int(length) for length in shape)
        if min(shape, default=0) < 0:
            raise ValueError(f"{name!r} has the shape {shape}")
        places.append(
            TensorSpan(name=name, dtype=_DTYPES[dtype], shape=shape, start=start, stop=stop)
        )
    return tuple(sorted(places, key=lambda place: (place.start, place.stop)))


# In a checkpoint's JSON: part -> name -> shape, type and slices of every tensor.
SLICES = "slices"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A block of a tensor, stored in a file under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Slice":
        """Rebuild from the JSON in a checkpoint."""
        offset, shape = tuple(record["offset"]), tuple(record["shape"])
        return cls(file=record["file"], offset=offset, shape=shape)

    def count_in(self, offset: Sequence[int], shape: Sequence[int]) -> int:
        """Return the number of this slice's elements that are in the given block."""
        blocks = zip(self.offset, self.shape, offset, shape, strict=True)
        return math.prod(max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in blocks)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is sharded (importing DTensor to check would take half a second)."""
    return hasattr(tensor, "__create_chunk_list__")


def local_slice(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return offset and data of this process's share of a tensor; all of an unsharded one."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tensor
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError("a tensor of partial sums cannot be stored; reduce it first")
    # The method by which torch.distributed.checkpoint gets the chunks of a sharded tensor.
    chunks: Sequence[Any] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = tensor.to_local()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise ValueError(f"placements {tensor.placements} do not give each process a single block")
    return tuple(chunks[0].offsets), local


def copy_overlap(
    source: Tensor, source_offset: Sequence[int], target: Tensor, target_offset: Sequence[int]
) -> None:
    """Copy the overlap of two blocks of one tensor."""
    blocks = zip(source_offset, source.shape, target_offset, target.shape, strict=True)
    for dim, (a, a_length, b, b_length) in enumerate(blocks):
        first, last = max(a, b), min(a + a_length, b + b_length)
        if first >= last:
            return
        source = source.narrow(dim, first - a, last - first)
        target = target.narrow(dim, first - b, last - first)
    target.copy_(source)


STATE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """Everything the next step depends on: tensors by part, and what JSON can hold."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # part -> name -> tensor on any device
    state: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(t.nbytes for tensors in self.tensors.values() for t in tensors.values())

    @property
    def device(self) -> torch.device:
        """The tensors' device; the GPU if any of them is there."""
        found = {t.device for tensors in self.tensors.values() for t in tensors.values()}
        return max(found, key=lambda device: device.type != "cpu", default=torch.device("cpu"))

    @property
    def files(self) -> list[Contents]:
        """The safetensors files, whose tensors must not change while they are read."""
        return [_LiveFile(part, tensors) for part, tensors in self.tensors.items()]


class _LiveFile(Contents):
    """A safetensors file of tensors that must not change while it is read."""

    def __init__(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = f"{part}.safetensors"
        self._layout = lay_out(tensors)
        self._tensors = tensors

    @property
    def size(self) -> int:
        return self._layout.size

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        header = self._layout.header
        view = spare(stop - start)
        out = torch.frombuffer(view, dtype=torch.uint8)
        if start < len(header):
            piece = header[start:stop]
            out[: len(piece)].copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        for place in self._layout.overlapping(start, stop):
            first, last = max(start, place.start), min(stop, place.stop)
            _copy_bytes(
                self._tensors[place.name], first - place.start, out[first - start : last - start]
            )
        return view


class _HostCopyFile(Contents):
    """A safetensors file in host memory, exactly as it will be written."""

    def __init__(
        self, part: str, layout: FileLayout, device: torch.device, *, is_shared: bool
    ) -> None:
        self.name = f"{part}.safetensors"
        self.memory = open_shared(layout.size) if is_shared else -1  # its file descriptor
        if is_shared:
            weakref.finalize(self, os.close, self.memory)
        self._block = allocate(layout.size, device, self.memory)
        header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._block[: len(header)].copy_(header)
        self._bytes = view_of(self._block)
        self.tensors = {place.name: tensor_at(self._block, place) for place in layout.spans}

    @property
    def size(self) -> int:
        return len(self._bytes)

    def touch(self) -> None:
        self._block[:: mmap.PAGESIZE].add_(0)

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        return self._bytes[start:stop]


class HostCopy:
    """A copy of a live state on the host; its memory is reused for states of the same shapes."""

    def __init__(self, live: LiveState, *, is_shared: bool = False) -> None:
        self.state: Mapping[str, Any] = {}
        self.device = live.device  # where it was copied from
        self._shapes = _shapes(live)
        self._files = {
            part: _HostCopyFile(part, lay_out(tensors), live.device, is_shared=is_shared)
            for part, tensors in live.tensors.items()
        }

    def fits(self, live: LiveState) -> bool:
        """Whether the state has the shapes that this copy was made for."""
        return self._shapes == _shapes(live)

    def touch(self) -> None:
        """Make the system provide the memory: the first write to a page costs more than a copy."""
        for file in self._files.values():
            file.touch()

    def fill(self, live: LiveState) -> None:
        """Copy the state; when this returns, training may change its tensors."""
        self.state = live.state
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for part, tensors in live.tensors.items():
            mine = self._files[part].tensors
            targets += [mine[name] for name in tensors]
            sources += [tensor.detach() for tensor in tensors.values()]
        if targets:
            # One call for all: a loop in Python costs as much as the copies of small tensors.
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if live.device.type == "cuda":
            torch.cuda.synchronize(live.device)

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The copied tensors by part."""
        return {part: file.tensors for part, file in self._files.items()}

    @property
    def files(self) -> list[Contents]:
        """The safetensors files of the checkpoint."""
        return list(self._files.values())


class HostCopies:
    """At most two copies, whose memory is reused: one that is being written, and the next."""

    # What a copy of the state must leave to everything else on the machine.
    spare_bytes: ClassVar[int] = 512 * 1024 * 1024

    def __init__(self, sender: PartSender | None = None, num_copiers: int = 1) -> None:
        self._copies: list[HostCopy] = []
        self._sender = sender
        self._num_copiers = num_copiers  # processes of this machine that copy at the same moment
        self._preparing: threading.Thread | None = None

    def prepare(self, live: LiveState) -> None:
        """Allocate the memory of the first copy in a thread, which `copy` waits for."""
        if self._preparing is None and not self._copies:
            live.files  # noqa: B018 - what no file can hold is refused here, not in the thread
            self._preparing = threading.Thread(target=self._prepare, args=(live,), daemon=True)
            self._preparing.start()

    def _prepare(self, live: LiveState) -> None:
        with suppress(MemoryError):  # `copy` finds that as well
            if (copy := self._new(live)) is not None:
                copy.touch()
                self._copies.append(copy)

    def copy(self, live: LiveState, writing: HostCopy | None) -> HostCopy | None:
        """Copy to the host; None if memory cannot hold it besides the one being written."""
        if self._preparing is not None:
            self._preparing.join()
        self._copies = [copy for copy in self._copies if copy is writing or copy.fits(live)]
        copy = next((copy for copy in self._copies if copy is not writing), None)
        if copy is None:
            if (copy := self._new(live)) is None:
                return None
            self._copies.append(copy)
        copy.fill(live)
        return copy

    def _new(self, live: LiveState) -> HostCopy | None:
        free = available_bytes()
        if free is not None and free - self._num_copiers * live.num_bytes < self.spare_bytes:
            return None
        return HostCopy(live, is_shared=self._sender is not None and self._sender.start())


def tensor_at(block: Tensor, span: TensorSpan) -> Tensor:
    """Return the tensor whose bytes are at `span` of a block of bytes."""
    return block[span.start : span.stop].view(span.dtype).view(span.shape)


def _find_nan(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN (infinities may be intended, as in masks)."""
    for name, tensor in tensors.items():
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.element_size() == 1:
            tensor = tensor.float()  # amin does not support 8-bit types
        # If any number is NaN, so is the minimum; isnan of all of them would make a copy.
        if bool(tensor.detach().amin().isnan()):
            return name
    return None


def send_state(
    store: Store,
    name: str,
    state: LiveState | HostCopy,
    progress: TransferProgress,
    where: str,
    tasks: Sequence[Callable[[], None]] = (),
) -> tuple[FileEntry, ...]:
    """Send the tensors of a checkpoint with that name, and run the `tasks`.

    DivergedError, which names `where`, if any weight of the model is NaN.
    """
    return send(
        store,
        checkpoint_prefix(name),
        state.files,
        progress,
        tasks=[lambda: _refuse_nan(state, step_of(name), where), *tasks],
        allocate=lambda size: view_of(allocate(size, state.device)),
    )


def _refuse_nan(live: LiveState | HostCopy, step: int, where: str) -> None:
    from_the_start = live.state.get("unset", ())
    for part, tensors in live.tensors.items():
        own = {name: tensor for name, tensor in tensors.items() if name not in from_the_start}
        if part.split(".")[0] == "model" and (name := _find_nan(own)) is not None:
            message = f"{where}: {name} contains a NaN"
            raise DivergedError(Divergence(step=step, message=message))


def _shapes(live: LiveState) -> dict[str, list[tuple[str, torch.dtype, torch.Size]]]:
    return {
        part: [(name, t.dtype, t.shape) for name, t in tensors.items()]
        for part, tensors in live.tensors.items()
    }


def _copy_bytes(tensor: Tensor, start: int, out: Tensor) -> None:
    """Copy bytes from `start` on, in the order of a contiguous tensor, until `out` is full."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        data = tensor.view(-1).view(torch.uint8)
        out.copy_(data[start : start + len(out)])
        return
    # Row by row: a contiguous copy of the entire tensor might not fit into memory.
    row_bytes = tensor[0].numel() * tensor.element_size()
    stop = start + len(out)
    for row in range(start // row_bytes, -(-stop // row_bytes)):
        base = row * row_bytes
        first, last = max(start, base), min(stop, base + row_bytes)
        data = tensor[row].contiguous().view(-1).view(torch.uint8)
        out[first - start : last - start].copy_(data[first - base : last - base])
