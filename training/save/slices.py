"""Tensors of which each process has a slice: the slices' positions and overlaps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# In a checkpoint's JSON: part -> name -> shape, type and slices of every tensor.
SLICES = "slices"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A block of a tensor, stored in a file under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def count_in(self, offset: Sequence[int], shape: Sequence[int]) -> int:
        """Number of this slice's elements that are in the given block."""
        blocks = zip(self.offset, self.shape, offset, shape, strict=True)
        return math.prod(max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sliced:
    """A tensor of a checkpoint as its slices."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[Slice, ...]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Sliced":
        """Rebuild from the JSON in a checkpoint."""
        slices = tuple(
            Slice(file=s["file"], offset=tuple(s["offset"]), shape=tuple(s["shape"]))
            for s in record["slices"]
        )
        return cls(
            shape=tuple(record["shape"]), dtype=getattr(torch, record["dtype"]), slices=slices
        )


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is sharded (importing DTensor to check would take half a second)."""
    return hasattr(tensor, "__create_chunk_list__")


def local_slice(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Offset and data of this process's share of a tensor; all of an unsharded one."""
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


def is_first_holder(tensor: Tensor, rank: int) -> bool:
    """Whether this process writes its share, as the first of those with the same share."""
    if not is_sharded(tensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )


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
