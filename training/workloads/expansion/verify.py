"""Checks that a grown model computes what the smaller one did, on a fixed batch, in eval mode.

Rounding may flip a router's near-tie, and the rest of that text is then computed by other experts:
such texts are counted but not judged. On a GPU, switch TF32 off before you observe.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
