"""Deepening: inserts new blocks that add nothing to the residual stream between the old ones.

A new block is a copy of its neighbour with zeros where it adds to the stream: x + 0 is x, bit for
bit. Gradients reach the zeros first, then the rest. Plain copies would not preserve the function.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from training.workloads.expansion.layout import Layout
from training.workloads.expansion.tensors import OnDemand, OptimizerState


def evenly_after(num_blocks: int, num_new: int) -> tuple[int, ...]:
    """Return the blocks after which new ones are evenly spread: (7, 4) -> 1, 3, 5, 6."""
    return tuple(-(-(number + 1) * num_blocks // num_new) - 1 for number in range(num_new))


def block_origins(num_blocks: int, after: Sequence[int]) -> tuple[int | None, ...]:
    """Return the old number of each block of the deeper model; None for a new one."""
    origins: list[int | None] = []
    for number in range(num_blocks):
        origins += [number, *[None] * list(after).count(number)]
    if len(origins) != num_blocks + len(after):
        wrong = next(place for place in after if place not in range(num_blocks))
        raise ValueError(f"a block after block {wrong}: there are blocks 0 to {num_blocks - 1}")
    return tuple(origins)


def deepen(
    state: Mapping[str, Tensor],
    layout: Layout,
    *,
    after: Sequence[int],
    fresh: Mapping[str, Tensor] | None = None,
) -> Mapping[str, Tensor]:
    """Return the state of a deeper model with the same outputs, each tensor made when it is read.

    A new block follows each old block whose number is in `after`. With `fresh`, the state_dict of a
    new deeper model, it may be another kind of block (dense among experts, another hidden size):
    `fresh` decides names and shapes and supplies what the neighbour lacks.
    """
    origins = block_origins(_num_blocks(state, layout), after)
    makers: dict[str, Callable[[], Tensor]] = {
        name: partial(state.__getitem__, old) for name, old in _renamed(state, layout, origins)
    }
    for number, neighbour in _new_blocks(origins):
        like = neighbour if fresh is None else number
        rests = _rests(state if fresh is None else fresh, layout, like)
        if not rests:
            raise ValueError(f"fresh has no tensors of block {number}, which is new")
        names = {rest: layout.in_block(number, rest) for rest in rests}
        if not any(layout.of(name).adds for name in names.values()):
            raise ValueError(
                f"block {number} is new: none of its {len(names)} tensors adds to the residual "
                "stream; write +width in the layout where one does"
            )
        for rest, name in names.items():
            source = layout.in_block(neighbour, rest)
            adds = layout.of(name).adds
            makers[name] = partial(_added, name, source, state, fresh, adds=adds)
    return OnDemand(makers)


def deepen_optimizer(
    state: OptimizerState, layout: Layout, *, num_blocks: int, after: Sequence[int]
) -> OptimizerState:
    """Return the optimizer's state under the deeper model's names; new blocks start without it.

    `num_blocks` counts the old blocks, because not every parameter must have a state.
    """
    origins = block_origins(num_blocks, after)
    makers: dict[str, Callable[[], Mapping[str, Any]]] = {
        name: partial(state.__getitem__, old) for name, old in _renamed(state, layout, origins)
    }
    return OnDemand(makers)


def _added(
    name: str,
    source: str,
    state: Mapping[str, Tensor],
    fresh: Mapping[str, Tensor] | None,
    *,
    adds: bool,
) -> Tensor:
    """Make a new block's tensor: zero where it adds, else the neighbour's, else a fresh one."""
    if fresh is None:
        return torch.zeros_like(state[source]) if adds else state[source].clone()
    if adds:
        return torch.zeros_like(fresh[name])
    old = state.get(source)
    return fresh[name] if old is None or old.shape != fresh[name].shape else old.clone()


def _new_blocks(origins: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield each new block's number and the old block before it."""
    neighbour = 0
    for number, origin in enumerate(origins):
        if origin is None:
            yield number, neighbour
        else:
            neighbour = origin


def _rests(names: Iterable[str], layout: Layout, number: int) -> list[str]:
    """Return the names of a block's tensors, without the block's prefix."""
    found = [layout.block_of(name) for name in names]
    return [block[1] for block in found if block and block[0] == number]


def _num_blocks(state: Mapping[str, Tensor], layout: Layout) -> int:
    found = {block[0] for name in state if (block := layout.block_of(name))}
    if not found or found != set(range(len(found))):
        raise ValueError(
            f"the blocks {layout.blocks!r} are numbered {sorted(found)}, not from 0 on"
        )
    return len(found)


def _renamed(
    state: Mapping[str, Any], layout: Layout, origins: Sequence[int | None]
) -> list[tuple[str, str]]:
    """Return (name in the deeper model, name in `state`) for everything in `state`."""
    places = {origin: place for place, origin in enumerate(origins) if origin is not None}
    pairs = []
    for name in state:
        found = layout.block_of(name)
        pairs.append((layout.in_block(places[found[0]], found[1]) if found else name, name))
    return pairs
