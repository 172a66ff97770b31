"""Stacks samples of equal shapes: a `collate` that loader workers divide among them by rows.

It converts and pads nothing: samples that differ in structure, shape or type are refused.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from contract.errors import UserError

# Torch's own alignment, so that no kernel takes another path for a batch that a worker made.
ALIGNMENT = 64


def stack(items: Sequence[Any]) -> Any:
    """Stack the tensors, arrays and numbers of samples along a new first dimension.

    Samples are trees of dicts, lists and tuples; the batch has the same structure.
    """
    layout = ItemLayout.of(items[0])
    # Torch would keep the strides of images whose channels come last: a worker's batch has not.
    return layout.batch([torch.stack(values).contiguous() for values in layout.values(items)])


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a tree, or of any mapping, in their order."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


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
        structure, found = _structure_of(item), list[list[Tensor]]()
        _gather(structure, [item], found)
        return cls(structure, tuple((value.dtype, value.shape) for (value,) in found))

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
        if not items:
            return
        rows = slice(first, first + len(items))
        # One call a column: a copy of each value would take longer than a small step's backward.
        for column, values in zip(columns, self.values(items), strict=True):
            torch.stack(values, out=column[rows])

    def values(self, items: Sequence[Any]) -> list[list[Tensor]]:
        """Return the samples' values by column."""
        found = list[list[Tensor]]()
        if not _gather(self.structure, items, found) or any(
            value.dtype is not dtype or value.shape != shape
            for values, (dtype, shape) in zip(found, self.leaves, strict=True)
            for value in values
        ):
            raise differing(self, next(one for one in map(ItemLayout.of, items) if one != self))
        return found

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


def _structure_of(item: Any) -> _Structure:
    if isinstance(item, Mapping):
        return _Branch(type(item), tuple(item), tuple(map(_structure_of, item.values())))
    if isinstance(item, list | tuple):
        return _Branch(type(item), tuple(range(len(item))), tuple(map(_structure_of, item)))
    return None


def _gather(structure: _Structure, items: Sequence[Any], found: list[list[Tensor]]) -> bool:
    """Add the items' values to `found`, by leaf; False if an item has another structure."""
    if structure is None:
        others = [item for item in items if type(item) is not Tensor]
        if any(isinstance(item, Mapping | list | tuple) for item in others):
            return False
        found.append(list(map(_as_tensor, items)))
        return True
    kind, keys, parts = structure
    if any(type(item) is not kind or len(item) != len(keys) for item in items):
        return False
    if issubclass(kind, Mapping) and any(tuple(item) != keys for item in items):
        return False
    columns = ([item[key] for item in items] for key in keys)
    return all(_gather(part, column, found) for part, column in zip(parts, columns, strict=True))


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
    if type(leaf) is Tensor and leaf.is_cpu and not leaf.requires_grad:
        return leaf
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().as_subclass(Tensor)
    if not isinstance(leaf, np.ndarray | np.generic | int | float):
        raise UserError(
            f"a sample with a {type(leaf).__name__} cannot be stacked; let `get` return "
            "tensors, arrays and numbers, or write another `collate`"
        )
    return torch.as_tensor(leaf)
