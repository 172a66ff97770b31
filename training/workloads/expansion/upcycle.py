"""Upcycling: a dense feed-forward layer becomes experts that start as its copies.

It is exact for every router if the weights of a token's experts sum to one. The router must not be
zero, because ties would send every token to the same experts.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from training.workloads.expansion.layout import Layout
from training.workloads.expansion.tensors import (
    FIRST_MOMENTS,
    REWARM,
    SECOND_MOMENTS,
    OnDemand,
    OptimizerState,
    T,
    check_adams,
)


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
