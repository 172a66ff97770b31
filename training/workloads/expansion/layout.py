"""The axes of a model's tensors, in one line each: all that growth must know about a model.

"blocks.*.ffn.up.weight": "hidden <- width"      [hidden, width]: computes hidden, reads width
"h.*.attn.c_attn.weight": "width -> (3 heads)"   [width, 3 x heads], packed: reads width
"blocks.*.ffn.down.bias": "+width"               is added to the residual stream

Tensors made one at a time, so a model grows without a second copy of itself in memory.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

_AXIS = re.compile(r"\(\d+ [a-zA-Z]\w*\)|\b[a-zA-Z]\w*")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """One axis: the model's dimension along which it runs, and its side of the product."""

    dimension: str
    is_read: bool  # summed over, like columns of a Linear's weight; else computed, like its rows
    parts: int = 1  # packed one after another, such as query, key and value


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """The axes of one tensor, and whether it adds to the residual stream."""

    axes: tuple[_Axis, ...]
    adds: bool = False  # to the residual stream: zeros here make the entire branch zero
    is_divided: bool = False  # carries 1/factor for a reader that cannot (see Layout.divided)

    def copies(self, factors: Mapping[str, int]) -> int:
        """Return how often a widened tensor holds each of its former values."""
        return math.prod(factors.get(axis.dimension, 1) for axis in self.axes)

    def value_divisor(self, factors: Mapping[str, int]) -> int:
        """Return the divisor of a widened tensor's values: the copies of what it reads."""
        divided = self._factor(factors, is_read=False) if self.is_divided else 1
        return divided * self._factor(factors, is_read=True)

    def gradient_divisor(self, factors: Mapping[str, int]) -> int:
        """Return the divisor of a widened tensor's gradient: the copies of what it computes."""
        return 1 if self.is_divided else self._factor(factors, is_read=False)

    def _factor(self, factors: Mapping[str, int], *, is_read: bool) -> int:
        return math.prod(
            factors.get(axis.dimension, 1) for axis in self.axes if axis.is_read == is_read
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of a model's state_dict: name with `*` for numbers -> axes.

    Axes are in the tensor's order, with computed and read ones on their side of the arrow (`<-`
    for [out, in] as in Linear, `->` for [in, out] as in GPT-2's Conv1D); without an arrow, all are
    computed. The same word means the same dimension everywhere. `(3 heads)` is one axis of three
    packed parts; `+width` marks a tensor that adds to the residual stream. A single number has no
    axis, so its text is empty.
    """

    tensors: Mapping[str, str]
    # The prefix of a block's tensors; its `*` is the block's number.
    blocks: str = "blocks.*"
    # Norms before a tied head: the head reads the embedding, which cannot carry 1/factor itself.
    divided: Collection[str] = ()
    # Dense tensor -> the experts' tensor that it becomes: one per expert if that has one more `*`,
    # else one of all, stacked along a new first axis. Several into one are packed in this order.
    experts: Mapping[str, str] = field(default_factory=dict)
    routers: Collection[str] = ()  # tensors that only a model with experts has

    def __post_init__(self) -> None:
        for name in (*self.divided, *self.routers, *self.experts, *self.experts.values()):
            if name not in self.tensors:
                raise ValueError(f"layout: {name!r} is not among the tensors; describe its axes")
        if self.blocks.count("*") != 1:
            raise ValueError(f"layout: blocks is {self.blocks!r}; use one * for the number")
        _ = self._patterns

    def of(self, name: str, num_axes: int | None = None) -> TensorLayout:
        """Return a tensor's layout; ValueError unless exactly one fits, with `num_axes` axes."""
        found = [(key, own) for key, pattern, own in self._patterns if pattern.fullmatch(name)]
        if len(found) != 1:
            lines = ", ".join(repr(key) for key, _ in found) or "no line"
            raise ValueError(f"tensor {name!r}: {lines} of the layout fits; exactly one must fit")
        ((key, own),) = found
        if num_axes is not None and num_axes != len(own.axes):
            raise ValueError(
                f"tensor {name!r} has {num_axes} axes, but the layout's {key!r} describes "
                f"{len(own.axes)}: {self.tensors[key]!r}"
            )
        return own

    def check_factors(self, factors: Mapping[str, int]) -> None:
        """Raise ValueError unless the factors are whole numbers for existing dimensions."""
        known = {axis.dimension for _, _, own in self._patterns for axis in own.axes}
        for dimension, factor in factors.items():
            if dimension not in known:
                raise ValueError(
                    f"no tensor has the dimension {dimension!r}; the layout knows "
                    f"{', '.join(sorted(known))}"
                )
            if not isinstance(factor, int) or factor < 1:
                raise ValueError(f"factor {factor!r} of {dimension!r}: use a whole number from 1")

    def block_of(self, name: str) -> tuple[int, str] | None:
        """Return the number of the tensor's block and the rest of its name; None outside blocks."""
        found = self._block.fullmatch(name)
        return (int(found["number"]), found["rest"]) if found else None

    def in_block(self, number: int, rest: str) -> str:
        """Return the name of a block's tensor: the inverse of `block_of`."""
        return f"{self.blocks.replace('*', str(number))}.{rest}"

    @cached_property
    def _block(self) -> re.Pattern[str]:
        prefix = re.escape(self.blocks).replace(r"\*", r"(?P<number>\d+)")
        return re.compile(rf"{prefix}\.(?P<rest>.+)")

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str], TensorLayout]]:
        divided = set(self.divided)
        return [
            (
                name,
                re.compile(re.escape(name).replace(r"\*", r"\d+")),
                _parsed(name, axes, is_divided=name in divided),
            )
            for name, axes in self.tensors.items()
        ]


def _parsed(name: str, text: str, *, is_divided: bool) -> TensorLayout:
    left, arrow, right = (part.strip() for part in _split(text))
    axes = [*_axes(left, is_read=arrow == "->"), *_axes(right, is_read=arrow == "<-")]
    plain = " ".join(text.replace("<-", " ").replace("->", " ").replace("+", "").split())
    written = " ".join(f"({a.parts} {a.dimension})" if a.parts > 1 else a.dimension for a in axes)
    if plain != written or text.count("+") > 1 or (text and not axes):
        raise ValueError(
            f"layout of {name!r}: cannot read {text!r}; write axes as in 'hidden <- width', "
            "'experts +width <- hidden' or 'width -> (3 heads)'"
        )
    return TensorLayout(axes=tuple(axes), adds="+" in text, is_divided=is_divided)


def _split(text: str) -> tuple[str, str, str]:
    for arrow in ("<-", "->"):
        if arrow in text:
            return text.partition(arrow)
    return text, "", ""


def _axes(text: str, *, is_read: bool) -> list[_Axis]:
    found = []
    for word in _AXIS.findall(text):
        parts, _, dimension = word.strip("()").rpartition(" ")
        found.append(_Axis(dimension=dimension, is_read=is_read, parts=int(parts or 1)))
    return found


T = TypeVar("T")

# Parameter name -> name in its optimizer's state -> value, as the engine passes it.
OptimizerState: TypeAlias = Mapping[str, Mapping[str, Any]]


# The names of AdamW's moments in its state: the averages of gradients and of their squares.
FIRST_MOMENTS = ("exp_avg",)
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
REWARM = "rewarm"  # axis, parts, copies, steps, done, since: what a `Rewarming` optimizer reads


class OnDemand(Mapping[str, T]):
    """A mapping whose values are made whenever they are read, and never kept."""

    def __init__(self, makers: Mapping[str, Callable[[], T]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> T:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def by_part(tensor: Tensor, place: int, parts: int, copies: int = 1) -> Tensor:
    """View one axis as three: packed parts, copies within each, values within a copy."""
    view: Tensor = tensor.unflatten(place, (parts, copies, -1))  # type: ignore[no-untyped-call]
    return view


@torch.no_grad()
def fill(model: nn.Module, grown: Mapping[str, Tensor]) -> None:
    """Copy a grown state into a model one tensor at a time; `load_state_dict` would make all first.

    ValueError if the names are not the model's, before anything has changed, or if a shape is not.
    """
    own = model.state_dict()
    missing, unknown = own.keys() - grown.keys(), grown.keys() - own.keys()
    if missing or unknown:
        lacks = f"the grown state lacks {_some(missing)}" if missing else ""
        has = f"it has {_some(unknown)}, which the model lacks" if unknown else ""
        raise ValueError("; ".join(part for part in (lacks, has) if part))
    for name, target in own.items():
        tensor = grown[name]
        _check_shape(repr(name), tensor, target)
        target.copy_(tensor)


def check_adams(state: OptimizerState) -> None:
    """Raise ValueError unless it is an Adam's state, whose moments can grow."""
    known = {"step", *FIRST_MOMENTS, *SECOND_MOMENTS, REWARM}
    for name, values in state.items():
        if unknown := sorted(values.keys() - known):
            raise ValueError(
                f"the optimizer's state of {name!r} has {unknown[0]!r}: how it grows is known for "
                "Adam's moments only; omit the state, and the optimizer starts without it"
            )


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Mapping[str, Any]]:
    """Return the state of a live optimizer in the form that the functions here grow."""
    return {
        name: optimizer.state[parameter]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def set_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, state: OptimizerState
) -> None:
    """Make an optimizer without state start from this one; parameters not in it start empty.

    ValueError if a name or a shape is not the model's.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, own in state.items():
        if name not in parameters:
            raise ValueError(f"the state has {name!r}, but no parameter of the model has that name")
        for key in own.keys() & {*FIRST_MOMENTS, *SECOND_MOMENTS}:
            _check_shape(f"{key!r} of {name!r}", own[key], parameters[name])
        optimizer.state[parameters[name]] = {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()
        }


def _check_shape(what: str, grown: Tensor, target: Tensor) -> None:
    if grown.shape != target.shape:
        raise ValueError(
            f"{what} has grown to {tuple(grown.shape)}, but the model expects "
            f"{tuple(target.shape)}; does its config fit the factors?"
        )


def _some(names: set[str]) -> str:
    first = sorted(names)
    return f"{first[0]!r}" + (f" and {len(first) - 1} more" if len(first) > 1 else "")
