"""Checks that a grown model computes what the smaller one did, on a fixed batch, in eval mode.

Rounding may flip a router's near-tie, and the rest of that text is then computed by other experts:
such texts are counted but not judged. On a GPU, switch TF32 off before you observe.

Checks that a grown model learns like the smaller one: its gradients on a probe, and its moments.

A value's copies, each divided by growth's divisor, are linear in that value. So, by the chain rule,
the gradients of its copies, summed and divided, are the smaller model's gradient, whatever noise
distinguishes the copies; and moments are averages of gradients. The functions that grow are not
used here.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workloads.expansion.layout import (
    FIRST_MOMENTS,
    REWARM,
    SECOND_MOMENTS,
    Layout,
    OptimizerState,
    TensorLayout,
)

# Differences that count as rounding, relative to the largest logit if that is above one. A correct
# growth of a deep model to four times its width was off by 5.7e-5 in float32.
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}
# The loss is a mean, in which rounding cancels.
_LOSS_SHARE = 0.1
# A margin is a near-tie up to this many times the largest difference of router logits.
_TIMES_DIFFERENCE = 10.0
_MAX_TIES = 0.01  # of a new router's tokens
_MAX_REROUTED = 0.5  # of the texts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Observation:
    """A model's results on the probe batch: B texts, T tokens, V vocabulary, E experts."""

    logits_BTV: Tensor
    losses_BT: Tensor  # cross-entropy of each target
    routers: Mapping[int, Tensor] = field(default_factory=dict)  # block -> logits (B, T, E)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The distance of a grown model from the smaller one; no `failures` if the function is kept.

    The differences are those of texts whose tokens all went to the same experts.
    """

    failures: tuple[str, ...]  # as sentences
    max_logit: float
    max_router_logit: float
    logit_difference: float
    loss_difference: float
    router_difference: float
    smallest_margin: float | None  # of the grown model's routers, if they choose
    judged_B: Tensor  # a mask of these texts
    num_texts: int
    num_rerouted_texts: int
    num_routings: int  # tokens x blocks with experts in both models
    num_near_ties: int  # among them

    @property
    def facts(self) -> dict[str, float]:
        """The numbers by name, for a log."""
        facts = {
            "max_logit_difference": self.logit_difference,
            "loss_difference": self.loss_difference,
        }
        if self.num_routings:
            facts |= {
                "router_logit_difference": self.router_difference,
                "routings": float(self.num_routings),
                "routings_near_ties": float(self.num_near_ties),
                "texts_rerouted": float(self.num_rerouted_texts),
            }
        if self.smallest_margin is not None:
            facts["smallest_router_margin"] = self.smallest_margin
        return facts


@torch.no_grad()
def observe(
    model: nn.Module,
    forward: Callable[[], Tensor],
    targets: Tensor,
    *,
    router: str | None = None,
    origins: Sequence[int | None] | None = None,
) -> _Observation:
    """Observe the model in eval mode: `forward` calls it on the probe and returns logits.

    `router` names the modules that return router logits, with `*` for the block's number. Blocks
    of a deepened model are numbered as in the smaller one: `origins` are its `block_origins`.
    """
    found: dict[int, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        block = _number(router, name)
        origin = block if origins is None or block is None else origins[block]
        if origin is not None:
            handles.append(module.register_forward_hook(_recorder(found, origin)))
    if router is not None and not handles:
        raise ValueError(f"no module of the model is called {router!r}; pass its routers' name")
    were_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        logits = forward()
    finally:
        for module in were_training:
            module.training = True
        for handle in handles:
            handle.remove()
    if len(found) < len(handles):
        raise ValueError(f"forward called {len(found)} of the {len(handles)} modules {router!r}")
    if logits.dtype not in _TOLERANCES:
        raise ValueError(
            f"logits are {logits.dtype}, in which wrong growth looks like rounding; use "
            "model.float() for both models"
        )
    logits_BTV = logits.view(len(logits), -1, logits.shape[-1])
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten(), reduction="none")
    return _Observation(
        logits_BTV=logits_BTV,
        losses_BT=losses.view(logits_BTV.shape[:2]),
        routers={block: _by_text(own, logits_BTV) for block, own in found.items()},
    )


def verify(before: _Observation, after: _Observation, *, top_k: int = 1) -> Verification:
    """Compare a grown model with the smaller one; each token goes to `top_k` experts."""
    routings = {
        block: _Routings.of(before.routers[block], after.routers[block], top_k)
        for block in sorted(before.routers.keys() & after.routers.keys())
    }
    is_other_B = torch.zeros(
        len(before.logits_BTV), dtype=torch.bool, device=before.logits_BTV.device
    )
    for own in routings.values():
        is_other_B |= own.is_other_BT.any(-1)
    judged_B = torch.ones_like(is_other_B) if is_other_B.all() else ~is_other_B
    difference = max(
        (_largest(own.difference_BTE[judged_B]) for own in routings.values()), default=0.0
    )
    margin = min(
        (_margins(own, top_k).min().item() for own in after.routers.values()), default=math.inf
    )
    limit = _TIMES_DIFFERENCE * difference
    found = Verification(
        failures=(),
        max_logit=_largest(before.logits_BTV),
        max_router_logit=max((_largest(own) for own in before.routers.values()), default=0.0),
        logit_difference=_largest((after.logits_BTV.double() - before.logits_BTV)[judged_B]),
        loss_difference=abs((after.losses_BT.double() - before.losses_BT)[judged_B].mean().item()),
        router_difference=difference,
        smallest_margin=margin if margin < math.inf else None,
        judged_B=judged_B,
        num_texts=len(is_other_B),
        num_rerouted_texts=int(is_other_B.sum()),
        num_routings=sum(own.margins_BT.numel() for own in routings.values()),
        num_near_ties=sum(int((own.margins_BT <= limit).sum()) for own in routings.values()),
    )
    tolerance = max(_TOLERANCES[own.logits_BTV.dtype] for own in (before, after))
    failures = (
        *_other_function(found, tolerance),
        *_other_experts(routings, limit),
        *_ties(after, top_k),
    )
    return replace(found, failures=failures)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Routings:
    """The routings of one block before and after."""

    difference_BTE: Tensor  # of router logits
    margins_BT: Tensor  # before
    is_other_BT: Tensor  # whether a token went to other experts

    @classmethod
    def of(cls, before_BTE: Tensor, after_BTE: Tensor, top_k: int) -> "_Routings":
        experts = [own.topk(top_k).indices.sort().values for own in (before_BTE, after_BTE)]
        return cls(
            difference_BTE=after_BTE.double() - before_BTE,
            margins_BT=_margins(before_BTE, top_k),
            is_other_BT=(experts[0] != experts[1]).any(-1),
        )


def _other_function(found: Verification, tolerance: float) -> Iterator[str]:
    of_logits = tolerance * max(1.0, found.max_logit)
    of_routers = tolerance * max(1.0, found.max_router_logit)
    # `not <=` rather than `>`, so that NaN is also a failure.
    if not found.logit_difference <= of_logits:
        yield (
            f"logits differ by up to {found.logit_difference:.3g}, where {of_logits:.1g} could be "
            "rounding: the grown model computes another function"
        )
    if not found.loss_difference <= _LOSS_SHARE * of_logits:
        yield (
            f"the loss on the same batch differs by {found.loss_difference:.3g}, where "
            f"{_LOSS_SHARE * of_logits:.1g} could be rounding"
        )
    # Including those of experts not chosen, because they decide what counts as a near-tie.
    if not found.router_difference <= of_routers:
        yield (
            f"router logits differ by up to {found.router_difference:.3g}, where {of_routers:.1g} "
            "could be rounding"
        )
    if found.num_rerouted_texts > _MAX_REROUTED * found.num_texts:
        yield (
            f"in {found.num_rerouted_texts} of {found.num_texts} texts tokens went to other "
            "experts: too few are left to compare; use more and shorter texts if these are ties"
        )


def _other_experts(routings: Mapping[int, _Routings], limit: float) -> Iterator[str]:
    """Judge each rerouted text in the first block that did so, whose input was still the same."""
    was_other_B: Tensor | None = None
    for block, own in routings.items():
        is_first_BT = own.is_other_BT
        if was_other_B is not None:
            is_first_BT = is_first_BT & ~was_other_B[:, None]
        margins = own.margins_BT[is_first_BT]
        if num_wrong := int((margins > limit).sum()):
            yield (
                f"block {block} sends {num_wrong} of {own.margins_BT.numel()} tokens to other "
                f"experts, with margins up to {_largest(margins):.3g}, where {limit:.1g} could be "
                "a near-tie"
            )
        is_other_B = own.is_other_BT.any(-1)
        was_other_B = is_other_B if was_other_B is None else was_other_B | is_other_B


def _ties(after: _Observation, top_k: int) -> Iterator[str]:
    for block, logits_BTE in sorted(after.routers.items()):
        is_tied_BT = _margins(logits_BTE, top_k) == 0
        if is_tied_BT.sum() > _MAX_TIES * is_tied_BT.numel():
            yield (
                f"the router of block {block} does not tell its experts apart for "
                f"{int(is_tied_BT.sum())} of {is_tied_BT.numel()} tokens, which then go to the "
                "same experts; do not start it at zero"
            )


def _margins(logits: Tensor, top_k: int) -> Tensor:
    """Return the lead of the last chosen expert over the first that is not chosen."""
    # If all are chosen, the lead is infinite.
    highest = F.pad(logits, (0, 1), value=-math.inf).topk(top_k + 1).values
    return highest[..., top_k - 1] - highest[..., top_k]


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _number(router: str | None, name: str) -> int | None:
    if router is None:
        return None
    found = re.fullmatch(re.escape(router).replace(r"\*", r"(\d+)"), name)
    return int(found[1]) if found else None


def _by_text(router_logits: Tensor, logits_BTV: Tensor) -> Tensor:
    (B, T, _), num_experts = logits_BTV.shape, router_logits.shape[-1]
    if router_logits.numel() != B * T * num_experts:
        raise ValueError(
            f"the routers saw {router_logits.numel() // num_experts} tokens, but forward returned "
            f"logits of {B * T}; make it return all"
        )
    return router_logits.view(B, T, num_experts)


def _recorder(found: dict[int, Tensor], block: int) -> Callable[..., None]:
    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        # Some routers return a tuple that begins with their logits.
        found[block] = (output if isinstance(output, Tensor) else output[0]).detach()

    return record


# Differences that count as rounding, relative to the largest value of a tensor.
_GRADIENT_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3}
_MOMENT_TOLERANCES = {torch.bfloat16: 2.0**-7, torch.float32: 1e-6, torch.float64: 1e-12}


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
            tolerance = _GRADIENT_TOLERANCES[gradient.dtype]
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
        tolerance = _MOMENT_TOLERANCES[copies.dtype]
        # New copies that warm up separately start at zero.
        is_reset = [REWARM in after and not copy.any() for copy in copies]
        if all(is_reset) and wanted.any():
            is_reset[0] = False
        for copy, starts_at_0 in zip(copies, is_reset, strict=True):
            if not starts_at_0:
                largest.add(what, copy, wanted, tolerance)
