"""Upcycling: a dense feed-forward layer becomes experts that start as its copies.

Exact for every router if the weights of a token's experts sum to one. The router must not be zero:
ties would send every token to the same experts.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from training.expansion.layout import Layout
from training.expansion.tensors import OnDemand, OptimizerState


def upcycle(
    state: Mapping[str, Tensor],
    layout: Layout,
    *,
    num_experts: int,
    fresh: Mapping[str, Tensor],
    blocks: Iterable[int] | None = None,
) -> Mapping[str, Tensor]:
    """The state of a model with experts and the same outputs, each tensor made when it is read.

    The tensors that `layout.experts` names become experts in `blocks`, by default in all. Their
    routers are those of `fresh`, a new model's state_dict.
    """
    if num_experts < 2:
        raise ValueError(f"num_experts is {num_experts}; give at least 2")
    chosen = None if blocks is None else set(blocks)
    makers: dict[str, Callable[[], Tensor]] = {}
    changed = set()
    for old in state:
        names = list(_expert_names(old, layout, num_experts, chosen))
        is_stacked = bool(names) and names != [old] and len(names) == 1
        for name in names:
            makers[name] = partial(_copied, state, old, num_experts if is_stacked else None)
        if names != [old] and (found := layout.block_of(old)):
            changed.add(found[0])
    if not changed:
        raise ValueError(f"nothing becomes experts: no tensor is one of {list(layout.experts)}")
    routers = [_pattern(name) for name in layout.routers]
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
    """AdamW's state for the model with experts, each parameter's made when it is read.

    No rule is exact: which tokens an expert gets is decided by the router. On average its gradient
    is 1/num_experts of the dense layer's. Its square is between 1/num_experts^2, where gradients
    agree, and 1/(num_experts x top_k), where they are noise: the larger one makes smaller steps.
    """
    chosen = None if blocks is None else set(blocks)
    divisors = {"exp_avg": num_experts, "exp_avg_sq": num_experts * top_k}
    divisors["max_exp_avg_sq"] = divisors["exp_avg_sq"]

    def made(old: str, is_stacked: bool) -> Mapping[str, Any]:
        grown: dict[str, Any] = {}
        for key, value in state[old].items():
            if key in divisors:
                value = _stacked(value, num_experts) if is_stacked else value.clone()
                value = value.div_(divisors[key])
            grown[key] = value
        return grown

    makers: dict[str, Callable[[], Mapping[str, Any]]] = {}
    for old in state:
        names = list(_expert_names(old, layout, num_experts, chosen))
        if names == [old]:
            makers[old] = partial(state.__getitem__, old)
        else:
            makers |= {name: partial(made, old, len(names) == 1) for name in names}
    return OnDemand(makers)


def _expert_names(
    old: str, layout: Layout, num_experts: int, blocks: set[int] | None
) -> Iterator[str]:
    """What a dense tensor becomes: itself, one stacked tensor, or one for each expert."""
    found = layout.block_of(old)
    if found is not None and (blocks is None or found[0] in blocks):
        for dense, expert in layout.experts.items():
            if _pattern(dense).fullmatch(old):
                name = expert.replace("*", str(found[0]), 1)
                many = range(num_experts) if "*" in name else [0]
                yield from (name.replace("*", str(number)) for number in many)
                return
    yield old


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


def _copied(state: Mapping[str, Tensor], old: str, num_experts: int | None) -> Tensor:
    return state[old].clone() if num_experts is None else _stacked(state[old], num_experts)


def _stacked(tensor: Tensor, num_experts: int) -> Tensor:
    return tensor.expand(num_experts, *tensor.shape).clone()
