"""Stacks samples of equal shapes: a `collate` that loader workers divide among them by rows.

It converts and pads nothing: samples that differ in structure, shape or type are refused.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from contract.errors import UserError

# Torch's own alignment, so that no kernel takes another path for a batch that a worker made.
ALIGNMENT = 64


def stack(items: Sequence[Any]) -> Any:
    """Stack the tensors, arrays and numbers of samples along a new first dimension.

    Samples are trees of dicts, lists and tuples; the batch has the same structure.
    """
    layout = ItemLayout.of(items[0])
    memory = torch.empty(layout.num_bytes(len(items)), dtype=torch.uint8)
    columns = layout.columns(memory, len(items))
    layout.write(columns, 0, items)
    return layout.batch(columns)


class _Branch(NamedTuple):
    """A dict, list or tuple in a sample."""

    kind: type[Any]
    keys: tuple[Hashable, ...]
    parts: tuple["_Structure", ...]


# None: a leaf. Not torch's TreeSpec, which changes from version to version.
_Structure: TypeAlias = _Branch | None


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """The structure that a batch's samples share, and where their values are in memory."""

    structure: _Structure
    leaves: tuple[tuple[torch.dtype, torch.Size], ...]

    @classmethod
    def of(cls, item: Any) -> "ItemLayout":
        """Return the layout of a batch of samples like this one."""
        values, structure = _flattened(item)
        return cls(structure, tuple((value.dtype, value.shape) for value in values))

    def num_bytes(self, count: int) -> int:
        """Return the memory that a batch of `count` samples takes."""
        return max((end for _, end in self._places(count)), default=0)

    def columns(self, memory: Tensor, count: int) -> list[Tensor]:
        """Return the tensors of a batch, as views of `memory`."""
        return [
            memory[first:end].view(dtype).view(count, *shape)
            for (first, end), (dtype, shape) in zip(self._places(count), self.leaves, strict=True)
        ]

    def write(self, columns: Sequence[Tensor], first: int, items: Sequence[Any]) -> None:
        """Write samples into the rows from `first` on."""
        for row, item in enumerate(items, first):
            values, structure = _flattened(item)
            leaves = tuple((value.dtype, value.shape) for value in values)
            if leaves != self.leaves or structure != self.structure:
                raise differing(self, ItemLayout(structure, leaves))
            for column, value in zip(columns, values, strict=True):
                column[row].copy_(value)

    def batch(self, columns: Sequence[Tensor]) -> Any:
        """Return the batch in the structure of its samples."""
        return _built(self.structure, iter(columns))

    def _places(self, count: int) -> Iterator[tuple[int, int]]:
        first = 0
        for dtype, shape in self.leaves:
            end = first + count * shape.numel() * dtype.itemsize
            yield first, end
            first = -(-end // ALIGNMENT) * ALIGNMENT

    def __str__(self) -> str:
        shapes = [f"{str(dtype)[6:]}{list(shape)}" for dtype, shape in self.leaves]
        return str(_built(self.structure, iter(shapes))).replace("'", "")


def differing(one: ItemLayout, other: ItemLayout) -> UserError:
    """Return the error for samples that do not fit into one batch."""
    return UserError(
        f"samples of one batch cannot be stacked: one is {one}, another {other}; let `get` return "
        "equal shapes and types, or write a `collate` that pads"
    )


def _flattened(item: Any) -> tuple[list[Tensor], _Structure]:
    if isinstance(item, Tensor):
        return [item.detach()], None
    if isinstance(item, Mapping):
        keys, values = tuple(item), list(item.values())
    elif isinstance(item, list | tuple):
        keys, values = (), list(item)
    else:
        return [_as_tensor(item)], None
    parts = [_flattened(value) for value in values]
    leaves = [leaf for leaves, _ in parts for leaf in leaves]
    return leaves, _Branch(type(item), keys, tuple(part for _, part in parts))


def _built(structure: _Structure, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    parts = [_built(part, leaves) for part in structure.parts]
    if issubclass(structure.kind, Mapping):
        return dict(zip(structure.keys, parts, strict=True))
    if hasattr(structure.kind, "_fields"):
        return structure.kind(*parts)
    return structure.kind(parts)


def _as_tensor(leaf: Any) -> Tensor:
    if not isinstance(leaf, np.ndarray | np.generic | int | float):
        raise UserError(
            f"a sample with a {type(leaf).__name__} cannot be stacked; let `get` return "
            "tensors, arrays and numbers, or write another `collate`"
        )
    return torch.as_tensor(leaf)
