"""AdamW for a widened model: rates with which it trains like the smaller one, and new copies.

A matrix divided by the number of its copies, s, must move that much less: learning rate / s, weight
decay x s, and Adam's epsilon divided like its gradient (the 1/fan-in rule of muP). With
`widen_optimizer(rewarm_steps=...)`, new copies in a tensor start separately: their moments are
young, so they have their own bias correction, and their learning rate rises from zero. Numbers in
the optimizer's state, and so in its state_dict, say which part of a tensor they are.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training.workloads.expansion.layout import REWARM, Layout, by_part

# Below this, the young moments' bias correction changes a step by less than a thousandth.
_SETTLED = 1e-3


class Rewarming(Optimizer):
    """A mixin for an AdamW whose state and groups have torch's names: see `RewarmingAdamW`.

    A new copy's step is AdamW's times a factor: its rising learning rate, and the bias correction
    for its own age instead of the tensor's.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each warming parameter separately, then all others together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        warming = [[p for p in group["params"] if self._is_warming(p)] for group in groups]
        if not any(warming):
            super().step()
            return loss
        others = [[p for p in group["params"] if not self._is_warming(p)] for group in groups]
        for number, own in enumerate(warming):
            for parameter in own:
                with _only(
                    groups, [[parameter] if n == number else [] for n in range(len(groups))]
                ):
                    self._step_warming(parameter, groups[number]["betas"])
        with _only(groups, others):
            super().step()
        return loss

    def _is_warming(self, parameter: Tensor) -> bool:
        return parameter.grad is not None and REWARM in self.state.get(parameter, {})

    def _step_warming(self, parameter: Tensor, betas: tuple[float, float]) -> None:
        """Step one parameter, with the new copies in it scaled by their own factor."""
        state = self.state[parameter]
        warm = state[REWARM] = {**state[REWARM], "done": state[REWARM]["done"] + 1}
        parts = by_part(parameter, warm["axis"], warm["parts"], warm["copies"])
        new = parts.narrow(warm["axis"] + 1, 1, warm["copies"] - 1)
        before = new.clone()
        super().step()
        new.copy_(before.lerp_(new, _factor(warm, *betas)))
        if warm["done"] >= warm["steps"] and betas[1] ** warm["done"] < _SETTLED:
            del state[REWARM]


class RewarmingAdamW(Rewarming, AdamW):
    """torch's AdamW, in which new copies of widened tensors warm up."""


def _factor(warm: Mapping[str, int], beta1: float, beta2: float) -> float:
    own, whole = warm["done"], warm["since"] + warm["done"]
    first = (1 - beta1**whole) / (1 - beta1**own)
    second = (1 - beta2**own) / (1 - beta2**whole)
    return min(1.0, own / warm["steps"]) * first * math.sqrt(second)


@contextmanager
def _only(groups: Sequence[dict[str, Any]], parameters: Sequence[list[Tensor]]) -> Iterator[None]:
    """Restrict the optimizer to these parameters, group by group."""
    whole = [group["params"] for group in groups]
    try:
        for group, own in zip(groups, parameters, strict=True):
            group["params"] = own
        yield
    finally:
        for group, own in zip(groups, whole, strict=True):
            group["params"] = own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scales:
    """Factors for one parameter's settings, relative to the narrow model's."""

    learning_rate: float
    weight_decay: float
    eps: float
    squared_norm: float  # of its gradient, in the total norm for clipping


def adamw_scales(
    names: Iterable[str], layout: Layout, factors: Mapping[str, int]
) -> dict[str, _Scales]:
    """Return each parameter's scales; `factors` are the products of all widenings so far."""
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
    """Return parameter groups for AdamW: one for each combination of rates.

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

    `torch.nn.utils.clip_grad_norm_` counts all copies: divided matrices keep their norm, but those
    of vectors, embedding and router change, so it clips in other steps.
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
