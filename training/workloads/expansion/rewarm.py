"""AdamW for `widen_optimizer(rewarm_steps=...)`: the new copies in a tensor start on their own.

Their moments are young while the rest of the tensor's are old, so the bias correction that one
count of steps gives would be wrong for them; and their learning rate rises from zero. Which part
of a tensor they are stands in the optimizer's state, as numbers, and so in its state_dict.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from training.workloads.expansion.tensors import REWARM, by_part

# From here on the young moments' bias correction changes a step by less than a thousandth.
_SETTLED = 1e-3


class Rewarming(Optimizer):
    """Stands before an AdamW whose state and groups have torch's names: see `RewarmingAdamW`.

    A new copy's step is the one that AdamW makes, times a factor: its rising learning rate, and the
    bias correction for its own age in place of the tensor's.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each parameter that warms by itself, then all others together."""
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
        """Step the one parameter, and the new copies in it by their own factor."""
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
    """torch's AdamW, in which the new copies of widened tensors warm up."""


def _factor(warm: Mapping[str, int], beta1: float, beta2: float) -> float:
    own, whole = warm["done"], warm["since"] + warm["done"]
    first = (1 - beta1**whole) / (1 - beta1**own)
    second = (1 - beta2**own) / (1 - beta2**whole)
    return min(1.0, own / warm["steps"]) * first * math.sqrt(second)


@contextmanager
def _only(groups: Sequence[dict[str, Any]], parameters: Sequence[list[Tensor]]) -> Iterator[None]:
    """Let the optimizer have these parameters alone, group by group."""
    whole = [group["params"] for group in groups]
    try:
        for group, own in zip(groups, parameters, strict=True):
            group["params"] = own
        yield
    finally:
        for group, own in zip(groups, whole, strict=True):
            group["params"] = own
