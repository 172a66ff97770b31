"""Widening: residual stream, heads and hidden units are copied, and the function is preserved.

Weights that compute a dimension are repeated; those that read it are divided among the copies. This
is exact for whole factors, LayerNorm and RMSNorm, any activation, experts; heads keep their size.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from training.workloads.expansion.layout import Layout, TensorLayout
from training.workloads.expansion.tensors import (
    FIRST_MOMENTS,
    REWARM,
    SECOND_MOMENTS,
    OnDemand,
    OptimizerState,
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
