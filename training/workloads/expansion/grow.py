"""Widening: residual stream, heads and hidden units are copied, and the function is preserved.

Weights that compute a dimension are repeated; those that read it are divided among the copies. This
is exact for whole factors, LayerNorm and RMSNorm, any activation, experts; heads keep their size.

Deepening: inserts new blocks that add nothing to the residual stream between the old ones.

A new block is a copy of its neighbour with zeros where it adds to the stream: x + 0 is x, bit for
bit. Gradients reach the zeros first, then the rest. Plain copies would not preserve the function.

Upcycling: a dense feed-forward layer becomes experts that start as its copies.

It is exact for every router if the weights of a token's experts sum to one. The router must not be
zero, because ties would send every token to the same experts.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from training.workloads.expansion.layout import (
    FIRST_MOMENTS,
    REWARM,
    SECOND_MOMENTS,
    Layout,
    OnDemand,
    OptimizerState,
    T,
    TensorLayout,
    by_part,
    check_adams,
)


def widen(
    state: Mapping[str, Tensor],
    layout: Layout,
    factors: Mapping[str, int],
    *,
    split_noise: float = 0.0,
    seed: int = 0,
) -> Mapping[str, Tensor]:
    """Return the state of a wider model with the same outputs, each tensor made when it is read.

    `factors`: dimension -> how many times; others stay. With `split_noise`, the copies of a row
    divide what they read unevenly, each in its own way: by noise of that many standard deviations
    of the tensor, which sums to zero over the copies read and so preserves the function. The noise
    depends only on `seed` and the tensor's name, not on device, threads or order. Tensors keep
    their type: bfloat16 is rounded, except for powers of two without noise.
    """
    layout.check_factors(factors)
    if split_noise < 0:
        raise ValueError(f"split_noise is {split_noise}; use standard deviations from 0")
    for name in state:
        layout.of(name)

    def made(name: str) -> Tensor:
        tensor = state[name]
        axes = layout.of(name, tensor.ndim)
        wide = _repeated(tensor, axes, factors)
        if (divisor := axes.value_divisor(factors)) == 1:
            return wide
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32)).div_(divisor)
        if split_noise and not axes.is_divided:
            deviation = split_noise * _spread(tensor)
            wide.add_(_noise(wide, axes, factors, deviation, seed, name))
        return wide.to(tensor.dtype)

    return OnDemand({name: partial(made, name) for name in state})


def widen_optimizer(
    state: OptimizerState,
    layout: Layout,
    factors: Mapping[str, int],
    *,
    rewarm_steps: int | None = None,
) -> OptimizerState:
    """Return AdamW's state for the wider model, each parameter's made when it is read.

    The gradients of repeated values are that much smaller, so their moments are divided likewise.
    With the rates of `adamw_scales`, the wider model then follows the smaller one's training. With
    `rewarm_steps`, new copies start without moments, and their learning rate rises over that many
    steps (for a `RewarmingAdamW`), so they diverge from the old ones.
    """
    layout.check_factors(factors)
    if rewarm_steps is not None and rewarm_steps < 1:
        raise ValueError(f"rewarm_steps is {rewarm_steps}; use 1 or more, or None")
    check_adams(state)

    def made(name: str) -> Mapping[str, Any]:
        values = state[name]
        axes = layout.of(name, values["exp_avg"].ndim)
        divisor = axes.gradient_divisor(factors)
        grown: dict[str, Any] = {}
        for key, value in values.items():
            if key in FIRST_MOMENTS:
                grown[key] = _repeated(value, axes, factors).div_(divisor)
            elif key in SECOND_MOMENTS:
                grown[key] = _repeated(value, axes, factors).div_(divisor**2)
            elif key != REWARM:  # from an earlier growth, whose copies are not a slice here
                grown[key] = value
        if rewarm_steps is not None:
            _reset_copies(grown, axes, factors, rewarm_steps)
        return grown

    return OnDemand({name: partial(made, name) for name in state})


def _repeated(tensor: Tensor, axes: TensorLayout, factors: Mapping[str, int]) -> Tensor:
    """Return a new tensor with each axis repeated, packed parts one by one."""
    wide = tensor
    for place, axis in enumerate(axes.axes):
        if (factor := factors.get(axis.dimension, 1)) > 1:
            copies = [by_part(wide, place, axis.parts)] * factor
            wide = torch.cat(copies, dim=place + 1).flatten(place, place + 2)
    return tensor.clone() if wide is tensor else wide


def _noise(
    like: Tensor,
    axes: TensorLayout,
    factors: Mapping[str, int],
    deviation: float,
    seed: int,
    name: str,
) -> Tensor:
    """Return uniform noise of this standard deviation that sums to zero over the copies read.

    It is uniform because a CPU generator's numbers times powers of two have the same bits
    everywhere; normal ones pass through a logarithm, which instruction sets round differently.
    """
    place, axis = next(
        (place, axis)
        for place, axis in enumerate(axes.axes)
        if axis.is_read and factors.get(axis.dimension, 1) > 1
    )
    factor = factors[axis.dimension]
    generator = torch.Generator().manual_seed(_seed_of(seed, name))
    noise = torch.rand(like.shape, generator=generator, dtype=torch.float32).sub_(0.5)
    noise = noise.to(like.device, like.dtype)
    copies = by_part(noise, place, axis.parts, factor).unbind(place + 1)
    # Centred in the weights' type, or the sum would be zero only in float32.
    mean = sum(copies[1:], start=copies[0]).div_(factor)
    for copy in copies:
        copy.sub_(mean)
    # The variance of a uniform number is 1/12, and centring `factor` of them removes a share of it.
    scale = deviation * math.sqrt(12 * factor / (factor - 1))
    return noise.mul_(scale)


def _spread(tensor: Tensor) -> float:
    """Return the standard deviation to three digits; sums round differently by device, threads."""
    return float(f"{tensor.double().std(correction=0).item():.3g}")


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def _reset_copies(
    grown: dict[str, Any], axes: TensorLayout, factors: Mapping[str, int], rewarm_steps: int
) -> None:
    """Zero the moments of the new copies, and record which part of the tensor they are.

    These are copies along a computed axis or, if none is copied (a router), along a read axis.
    """
    wide = [
        (axis.is_read, place)
        for place, axis in enumerate(axes.axes)
        if factors.get(axis.dimension, 1) > 1
    ]
    if not wide:
        return
    place = min(wide)[1]
    axis = axes.axes[place]
    copies = factors[axis.dimension]
    for key in (*FIRST_MOMENTS, *SECOND_MOMENTS):
        if key in grown:
            parts = by_part(grown[key], place, axis.parts, copies)
            parts.narrow(place + 1, 1, copies - 1).zero_()
    grown[REWARM] = {
        "axis": place,
        "parts": axis.parts,
        "copies": copies,
        "steps": rewarm_steps,
        "done": 0,
        "since": int(grown["step"]),
    }


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


def upcycle(
    state: Mapping[str, Tensor],
    layout: Layout,
    *,
    num_experts: int,
    fresh: Mapping[str, Tensor],
    blocks: Iterable[int] | None = None,
) -> Mapping[str, Tensor]:
    """Return the state of a model with experts and the same outputs, tensors made when read.

    The tensors in `layout.experts` become experts in `blocks`, by default in all. Their routers
    come from `fresh`, a new model's state_dict.
    """
    experts = _experts(state, layout, num_experts, blocks)
    makers = _unchanged(state, experts)

    def made(own: _Expert) -> Tensor:
        return own.join([state[old] for old in own.dense])

    makers |= {name: partial(made, own) for name, own in experts.items()}
    routers = [_pattern(name) for name in layout.routers]
    changed = {own.block for own in experts.values()}
    for name in fresh:
        found = layout.block_of(name)
        if found and found[0] in changed and any(router.fullmatch(name) for router in routers):
            makers[name] = partial(fresh.__getitem__, name)
    return OnDemand(makers)


def upcycle_optimizer(
    state: OptimizerState,
    layout: Layout,
    *,
    num_experts: int,
    top_k: int,
    blocks: Iterable[int] | None = None,
) -> OptimizerState:
    """Return AdamW's state for the model with experts, each parameter's made when it is read.

    No rule is exact, because the router decides which tokens an expert gets. On average, its
    gradient is 1/num_experts of the dense layer's. The square is between 1/num_experts^2, if
    gradients agree, and 1/(num_experts x top_k), if they are noise; the larger makes smaller steps.
    """
    check_adams(state)
    divisors = dict.fromkeys(FIRST_MOMENTS, num_experts)
    divisors |= dict.fromkeys(SECOND_MOMENTS, num_experts * top_k)
    experts = _experts(state, layout, num_experts, blocks)
    makers = _unchanged(state, experts)

    def made(own: _Expert) -> Mapping[str, Any]:
        states = [state[old] for old in own.dense]
        return {
            key: own.join([each[key] for each in states]).div_(divisors[key])
            if key in divisors
            else value
            for key, value in states[0].items()
            if key != REWARM  # from an earlier growth, whose axes are not the experts'
        }

    makers |= {name: partial(made, own) for name, own in experts.items()}
    return OnDemand(makers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expert:
    """The sources of one of the experts' tensors."""

    block: int
    dense: Sequence[str]  # packed along `axis` if there are several
    axis: int
    copies: int | None  # along a new first axis; None: the tensor is of one expert

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor in its own memory."""
        whole = torch.cat(list(parts), dim=self.axis) if len(parts) > 1 else parts[0]
        copies = () if self.copies is None else (self.copies,)
        return whole.expand(*copies, *whole.shape).clone()


def _experts(
    state: Iterable[str], layout: Layout, num_experts: int, blocks: Iterable[int] | None
) -> dict[str, _Expert]:
    """Return the experts' tensors by name; packed ones are in the order of `layout.experts`."""
    if num_experts < 2:
        raise ValueError(f"num_experts is {num_experts}; use at least 2")
    chosen = None if blocks is None else set(blocks)
    inside = [(old, found[0]) for old in state if (found := layout.block_of(old))]
    experts: dict[str, _Expert] = {}
    for dense, target in layout.experts.items():
        is_stacked = target.count("*") == layout.blocks.count("*")
        pattern = _pattern(dense)
        for old, block in inside:
            if not pattern.fullmatch(old) or (chosen is not None and block not in chosen):
                continue
            of_block = target.replace("*", str(block), 1)
            for number in range(1 if is_stacked else num_experts):
                name = of_block.replace("*", str(number))
                before = experts[name].dense if name in experts else ()
                experts[name] = _Expert(
                    block=block,
                    dense=(*before, old),
                    axis=_packed_axis(layout, name, is_stacked=is_stacked) if before else 0,
                    copies=num_experts if is_stacked else None,
                )
    if not experts:
        raise ValueError(f"nothing becomes experts: no tensor is one of {list(layout.experts)}")
    return experts


def _packed_axis(layout: Layout, name: str, *, is_stacked: bool) -> int:
    """Return the axis of one expert's tensor along which several dense ones are packed."""
    packed = [place for place, axis in enumerate(layout.of(name).axes) if axis.parts > 1]
    if len(packed) != 1:
        raise ValueError(
            f"several dense tensors become {name!r}, but the layout marks none of its axes as "
            "packed, as in 'experts (2 hidden) <- width'"
        )
    return packed[0] - is_stacked


def _unchanged(
    state: Mapping[str, T], experts: Mapping[str, _Expert]
) -> dict[str, Callable[[], T]]:
    used = {old for own in experts.values() for old in own.dense}
    return {name: partial(state.__getitem__, name) for name in state if name not in used}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))
