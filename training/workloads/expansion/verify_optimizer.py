"""Checks that a grown model learns like the smaller one: its gradients on a probe, and its moments.

A value's copies, each divided by growth's divisor, are linear in that value. So, by the chain rule,
the gradients of its copies, summed and divided, are the smaller model's gradient, whatever noise
distinguishes the copies; and moments are averages of gradients. The functions that grow are not
used here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from training.workloads.expansion.layout import Layout, TensorLayout
from training.workloads.expansion.tensors import (
    FIRST_MOMENTS,
    REWARM,
    SECOND_MOMENTS,
    OptimizerState,
)

# Differences that count as rounding, relative to the largest value of a tensor.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3}
_MOMENTS = {torch.bfloat16: 2.0**-7, torch.float32: 1e-6, torch.float64: 1e-12}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A smaller model's tensor in the grown one, and how to find its copies."""

    name: str
    axes: TensorLayout  # of the smaller model's tensor
    factors: Mapping[str, int]
    num_experts: int  # along a new first axis; 0: none
    top_k: int

    def copies(self, grown: Tensor) -> Tensor:
        """Return the copies along a first axis: (copies, *the smaller tensor's shape)."""
        if self.num_experts:
            return grown
        found = grown[None]
        for place, axis in enumerate(self.axes.axes, 1):
            factor = self.factors.get(axis.dimension, 1)
            view: Tensor = found.unflatten(place, (axis.parts, factor, -1))  # type: ignore[no-untyped-call]
            found = view.movedim(place + 1, 1).flatten(0, 1).flatten(place, place + 1)
        return found

    def fold(self, gradient: Tensor) -> Tensor:
        """Combine the copies' gradients into one of the smaller model's tensor."""
        return self.copies(gradient).double().sum(0).to(gradient.dtype) / self.divisor

    @property
    def divisor(self) -> int:
        """The divisor of the values in each copy."""
        return 1 if self.num_experts else self.axes.value_divisor(self.factors)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerVerification:
    """The largest differences, relative to each tensor's largest value, and those too large."""

    failures: Sequence[str]
    gradient_difference: float
    moment_difference: float | None  # None: no moments are carried over

    @property
    def facts(self) -> dict[str, float]:
        """The numbers by name, for a log."""
        facts = {"gradient_difference": self.gradient_difference}
        if self.moment_difference is not None:
            facts["moment_difference"] = self.moment_difference
        return facts


@dataclass(slots=True)
class _Largest:
    """The largest difference so far, and the worst of those beyond rounding."""

    difference: float = 0.0
    failure: str = ""
    worst: float = 0.0

    def add(self, what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
        scale = wanted.abs().max().item()
        error = (found.double() - wanted).abs().max().item()
        share = error / scale if scale else float(error > 0)
        self.difference = max(self.difference, share)
        # `not <=`, so that NaN is also a failure.
        if not share <= tolerance and not share <= self.worst:
            self.worst = share
            self.failure = (
                f"{what} differs by {share:.2g} of its largest value, where {tolerance:.1g} could "
                "be rounding"
            )


def places(
    names: Sequence[str],
    layout: Layout,
    *,
    factors: Mapping[str, int] | None = None,
    origins: Sequence[int | None] | None = None,
    num_experts: int = 0,
    top_k: int = 1,
) -> dict[str, _Place]:
    """Return each tensor's place in the grown model, by its name in the smaller one.

    `origins` are those of `block_origins`; with `num_experts`, dense layers have become that many
    stacked experts. Experts in another form are left out.
    """
    found = {}
    for name in names:
        expert = _expert(name, layout) if num_experts else None
        if expert == "":
            continue
        block, grown = layout.block_of(name), expert or name
        if origins is not None and block is not None:
            grown = layout.in_block(origins.index(block[0]), block[1])
        found[name] = _Place(
            name=grown,
            axes=layout.of(name),
            factors=factors or {},
            num_experts=num_experts if expert else 0,
            top_k=top_k,
        )
    return found


def _expert(name: str, layout: Layout) -> str | None:
    """Return the stacked experts' tensor that a dense one becomes; "": one in another form."""
    for dense, target in layout.experts.items():
        match = re.fullmatch(re.escape(dense).replace(r"\*", r"(\d+)"), name)
        if match:
            is_own = list(layout.experts.values()).count(target) == 1
            is_stacked = is_own and target.count("*") == dense.count("*")
            return target.replace("*", match[1], 1) if is_stacked else ""
    return None


def gradients(
    model: nn.Module,
    loss: Callable[[], Tensor],
    keep: Callable[[str, Tensor], Tensor | None] = lambda name, gradient: gradient,
) -> dict[str, Tensor]:
    """Return the results of `keep` on each parameter's gradient, which is freed at once."""
    found: dict[str, Tensor] = {}

    def take(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and (kept := keep(name, gradient)) is not None:
            found[name] = kept

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(take, name))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    loss().backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    return found


def verify_optimizer(
    small: Mapping[str, Tensor],
    grown: Mapping[str, Tensor],
    where: Mapping[str, _Place],
    before: OptimizerState,
    after: OptimizerState,
) -> OptimizerVerification:
    """Compare gradients of the same probe, the grown ones folded, and the optimizers' states."""
    of_gradients, of_moments = _Largest(), _Largest()
    for name, gradient in small.items():
        if (place := where.get(name)) is not None:
            what = f"the gradient of {place.name}, its copies summed and divided,"
            tolerance = _TOLERANCES[gradient.dtype]
            of_gradients.add(what, grown[place.name], gradient, tolerance)
    for name, place in where.items() if after else ():
        if name in before:
            _compare_moments(place, before[name], after.get(place.name, {}), of_moments)
    return OptimizerVerification(
        failures=[each.failure for each in (of_gradients, of_moments) if each.failure],
        gradient_difference=of_gradients.difference,
        moment_difference=of_moments.difference if after else None,
    )


def _compare_moments(
    place: _Place, before: Mapping[str, Tensor], after: Mapping[str, Tensor], largest: _Largest
) -> None:
    for key in (*FIRST_MOMENTS, *SECOND_MOMENTS):
        if key not in before:
            continue
        what = f"{key} of {place.name}, divided as its gradient is,"
        if key not in after:
            largest.add(f"{what} is missing:", torch.zeros(()), torch.ones(()), 0.0)
            continue
        copies = place.copies(after[key])
        # The copies that add up to one gradient; copies of what is read each have their own reader.
        divisor = len(copies) // place.divisor
        if key in SECOND_MOMENTS:
            divisor *= place.top_k if place.num_experts else divisor
        wanted = before[key].to(torch.float64) / divisor
        tolerance = _MOMENTS[copies.dtype]
        # New copies that warm up separately start at zero.
        is_reset = [REWARM in after and not copy.any() for copy in copies]
        if all(is_reset) and wanted.any():
            is_reset[0] = False
        for copy, starts_at_0 in zip(copies, is_reset, strict=True):
            if not starts_at_0:
                largest.add(what, copy, wanted, tolerance)
