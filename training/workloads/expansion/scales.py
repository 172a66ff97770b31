"""Rates by parameter with which a widened model trains exactly as the smaller one did.

A matrix that is divided by its copies must move by as much less: learning rate / s, weight decay
x s, and Adam's epsilon divided as its gradient is (the 1/fan-in rule of muP).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.workloads.expansion.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scales:
    """What one parameter's settings are multiplied by, compared with the narrow model's."""

    learning_rate: float
    weight_decay: float
    eps: float
    squared_norm: float  # of its gradient, within the norm of all for clipping


def adamw_scales(
    names: Iterable[str], layout: Layout, factors: Mapping[str, int]
) -> dict[str, _Scales]:
    """The scales of each parameter, for the factors of all widenings so far multiplied."""
    layout.check_factors(factors)
    found = {}
    for name in names:
        own = layout.of(name)
        divisor, smaller = own.value_divisor(factors), own.gradient_divisor(factors)
        found[name] = _Scales(
            learning_rate=1 / divisor,
            weight_decay=float(divisor),
            eps=1 / smaller,
            squared_norm=smaller**2 / own.copies(factors),
        )
    return found


def scaled_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    layout: Layout,
    factors: Mapping[str, int],
    *,
    lr: float,
    weight_decay: float,
    eps: float = 1e-8,
    decays: Callable[[str, Tensor], bool] = lambda name, tensor: True,
) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: one for each combination of rates.

    `parameters` are a model's `named_parameters()`; `decays` says which of them have weight decay.
    """
    named = dict(parameters)
    groups: dict[tuple[float, float, float], list[nn.Parameter]] = {}
    for name, scales in adamw_scales(named, layout, factors).items():
        decay = weight_decay * scales.weight_decay if decays(name, named[name]) else 0.0
        rates = (lr * scales.learning_rate, decay, eps * scales.eps)
        groups.setdefault(rates, []).append(named[name])
    return [
        {"params": own, "lr": rate, "weight_decay": decay, "eps": small}
        for (rate, decay, small), own in groups.items()
    ]


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[tuple[str, nn.Parameter]],
    layout: Layout,
    factors: Mapping[str, int],
    max_norm: float,
) -> Tensor:
    """Clip as the narrow model would, and return its norm: copies of a gradient count as one.

    `torch.nn.utils.clip_grad_norm_` counts all copies: divided matrices have the same norm as
    before, but vectors, embedding and router another, so that it clips in other steps.
    """
    named = {name: own for name, own in parameters if own.grad is not None}
    scales = adamw_scales(named, layout, factors)
    gradients = [own.grad for own in named.values() if own.grad is not None]
    norms = [
        torch.linalg.vector_norm(gradient) * math.sqrt(scales[name].squared_norm)
        for name, gradient in zip(named, gradients, strict=True)
    ]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for gradient in gradients:
        gradient.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))
    return total
