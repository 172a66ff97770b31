"""The axes of a model's tensors, in one line each: all that growth must know about a model.

"blocks.*.ffn.up.weight": "hidden <- width"      [hidden, width]: computes hidden, reads width
"h.*.attn.c_attn.weight": "width -> (3 heads)"   [width, 3 x heads], packed: reads width
"blocks.*.ffn.down.bias": "+width"               is added to the residual stream
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

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
