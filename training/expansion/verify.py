"""Whether a grown model computes what the smaller one did, on a fixed batch, in eval mode.

Compared are logits, loss, and for each token which experts it goes to. Near-ties of a router may
flip by rounding: they are counted, not judged. On a GPU switch TF32 off before you observe.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Differences that are rounding, relative to the largest logit where that is above one.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
_LOW_PRECISION = 1e-2
# A routing is compared if its margin is so many times the largest difference of router logits.
_TIMES_DIFFERENCE = 10.0
# The part of all routings that may be too close to compare, or ties.
_MAX_CLOSE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a model computed on the probe batch."""

    logits: Tensor  # (N, vocabulary)
    loss: float  # mean cross-entropy of the targets
    routers: Mapping[int, Tensor] = field(default_factory=dict)  # block -> logits (N, experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """How far a grown model is from the smaller one; no `failures` if the function is kept."""

    failures: tuple[str, ...]  # as sentences
    max_logit: float
    logit_difference: float
    loss_difference: float
    router_difference: float
    num_routings: int  # tokens x blocks with experts in both models
    num_rerouted: int  # to other experts, although the margin was large enough to compare
    num_close: int  # not compared
    smallest_margin: float | None  # of the grown model's routers

    @property
    def facts(self) -> dict[str, float]:
        """The numbers by name, for a log."""
        facts = {
            "max_logit_difference": self.logit_difference,
            "loss_difference": self.loss_difference,
            "routings_compared": float(self.num_routings - self.num_close),
            "routings_changed": float(self.num_rerouted),
            "routings_too_close": float(self.num_close),
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
) -> Observation:
    """What the model computes in eval mode: `forward` calls it on the probe, and returns logits.

    `router` names the modules that return router logits, with `*` for the block's number. Blocks
    of a deepened model are counted as in the smaller one: `origins` are its `block_origins`.
    """
    found: dict[int, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        block = _number(router, name)
        origin = block if origins is None or block is None else origins[block]
        if origin is not None:
            handles.append(module.register_forward_hook(_recorder(found, origin)))
    if router is not None and not handles:
        raise ValueError(f"no module of the model is called {router!r}; give its routers' name")
    was_training = model.training
    model.eval()
    try:
        logits = forward().flatten(0, -2)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if len(found) < len(handles):
        raise ValueError(f"forward called {len(found)} of the {len(handles)} modules {router!r}")
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(exact, targets.flatten()).item()
    return Observation(logits=logits, loss=loss, routers=found)


def verify(before: Observation, after: Observation, *, top_k: int = 1) -> Verification:
    """Compare a grown model with the smaller one; each token goes to `top_k` experts."""
    blocks = sorted(before.routers.keys() & after.routers.keys())
    routings = [_routed(before.routers[n], after.routers[n], top_k) for n in blocks]
    margins = [_margins(own, top_k) for own in after.routers.values()]
    max_logit = _largest(before.logits)
    found = Verification(
        failures=(),
        max_logit=max_logit,
        logit_difference=_largest(after.logits.double() - before.logits.double()),
        loss_difference=abs(after.loss - before.loss),
        router_difference=max((own.difference for own in routings), default=0.0),
        num_routings=sum(own.num_tokens for own in routings),
        num_rerouted=sum(own.num_rerouted for own in routings),
        num_close=sum(own.num_close for own in routings),
        smallest_margin=min((own.min().item() for own in margins), default=None),
    )
    tolerance = max(
        TOLERANCES.get(own.logits.dtype, _LOW_PRECISION) for own in (before, after)
    ) * max(1.0, max_logit)
    return replace(found, failures=(*_failures(found, tolerance), *_ties(after, top_k)))


def _failures(found: Verification, tolerance: float) -> Iterator[str]:
    # `not <=` rather than `>`: no number is a failure too.
    if not found.logit_difference <= tolerance:
        yield (
            f"logits differ by up to {found.logit_difference:.3g}, where {tolerance:.1g} could be "
            "rounding: the grown model computes another function"
        )
    if not found.loss_difference <= tolerance:
        yield (
            f"the loss on the same batch differs by {found.loss_difference:.3g}, where "
            f"{tolerance:.1g} could be rounding"
        )
    if found.num_rerouted:
        yield (
            f"{found.num_rerouted} of {found.num_routings} routings went to other experts, though "
            "their margin is larger than rounding"
        )
    if found.num_close > _MAX_CLOSE * found.num_routings:
        yield (
            f"{found.num_close} of {found.num_routings} routings are too close to compare: router "
            f"logits differ by up to {found.router_difference:.3g}"
        )


def _ties(after: Observation, top_k: int) -> Iterator[str]:
    for block, logits in sorted(after.routers.items()):
        num_tied = int((_margins(logits, top_k) == 0).sum())
        if num_tied > _MAX_CLOSE * len(logits):
            yield (
                f"the router of block {block} does not tell its experts apart for {num_tied} of "
                f"{len(logits)} tokens, which then go to the same ones; do not start it at zero"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Routed:
    """The routings of one block before and after."""

    difference: float  # of router logits
    num_tokens: int
    num_rerouted: int
    num_close: int


def _routed(before: Tensor, after: Tensor, top_k: int) -> _Routed:
    difference = _largest(after.double() - before.double())
    is_clear = _margins(before, top_k) > _TIMES_DIFFERENCE * difference
    experts = [own.topk(top_k).indices.sort().values for own in (before, after)]
    is_other = (experts[0] != experts[1]).any(-1)
    return _Routed(
        difference=difference,
        num_tokens=len(before),
        num_rerouted=int((is_clear & is_other).sum()),
        num_close=int((~is_clear).sum()),
    )


def _margins(logits: Tensor, top_k: int) -> Tensor:
    """By how much the last chosen expert leads the first that is not."""
    highest = logits.topk(top_k + 1).values
    return highest[:, top_k - 1] - highest[:, top_k]


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _number(router: str | None, name: str) -> int | None:
    if router is None:
        return None
    found = re.fullmatch(re.escape(router).replace(r"\*", r"(\d+)"), name)
    return int(found[1]) if found else None


def _recorder(found: dict[int, Tensor], block: int) -> Callable[..., None]:
    def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found[block] = output.detach().flatten(0, -2)

    return record
