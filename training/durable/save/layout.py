"""The positions of tensors: in a safetensors file, before any byte is written, and in slices.

The library can only write an entire file from copies of its tensors. Here the header and every
tensor's position follow from shapes alone, so that parts of the file can be made, sent and read in
any order and in little memory. https://github.com/huggingface/safetensors#format
"""

import bisect
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

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
        if tensor.dtype not in _CODES or tensor.layout != torch.strided:
            raise TypeError(
                f"{name}: safetensors cannot store a {tensor.layout} tensor of {tensor.dtype}"
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
