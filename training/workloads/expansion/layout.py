"""What each axis of a model's tensors is, in one line each: all that growth must know of a model.

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
    """One axis: the dimension of the model that it runs along, and which side of the product."""

    dimension: str
    is_read: bool  # summed over, as the columns of a Linear's weight; else computed, as its rows
    parts: int = 1  # that are packed one after another, such as query, key and value


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """The axes of one tensor, and what it adds to."""

    axes: tuple[_Axis, ...]
    adds: bool = False  # to the residual stream: zero here makes the whole branch zero
    is_divided: bool = False  # carries 1/factor for a reader that cannot (see Layout.divided)

    def copies(self, factors: Mapping[str, int]) -> int:
        """How often a widened tensor holds each of its former values."""
        return math.prod(factors.get(axis.dimension, 1) for axis in self.axes)

    def value_divisor(self, factors: Mapping[str, int]) -> int:
        """What a widened tensor's values are divided by: the copies of what it reads."""
        divided = self._factor(factors, is_read=False) if self.is_divided else 1
        return divided * self._factor(factors, is_read=True)

    def gradient_divisor(self, factors: Mapping[str, int]) -> int:
        """How much smaller a widened tensor's gradient is: the copies of what it computes."""
        return 1 if self.is_divided else self._factor(factors, is_read=False)

    def _factor(self, factors: Mapping[str, int], *, is_read: bool) -> int:
        return math.prod(
            factors.get(axis.dimension, 1) for axis in self.axes if axis.is_read == is_read
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of a model's state_dict: name with `*` for numbers -> axes.

    Axes stand in the order of the tensor's, computed and read ones on their side of the arrow (`<-`
    for [out, in] as in Linear, `->` for [in, out] as in GPT-2's Conv1D); without an arrow all are
    computed. The same word is the same dimension everywhere. `(3 heads)` is one axis of three
    packed parts; `+width` adds to the residual stream, and only what does so needs it. A single
    number has no axis: its text is empty.
    """

    tensors: Mapping[str, str]
    # The prefix of a block's tensors; its `*` is the block's number.
    blocks: str = "blocks.*"
    # Norms before a tied head: the head reads the embedding, which cannot carry 1/factor itself.
    divided: Collection[str] = ()
    # Dense tensor -> the expert's that it becomes: with one more `*` a tensor for each expert, else
    # one of all, stacked along a new first axis. Several that become one are packed in this order.
    experts: Mapping[str, str] = field(default_factory=dict)
    routers: Collection[str] = ()  # what only a model with experts has

    def __post_init__(self) -> None:
        for name in (*self.divided, *self.routers, *self.experts, *self.experts.values()):
            if name not in self.tensors:
                raise ValueError(f"layout: {name!r} is not among the tensors; describe its axes")
        if self.blocks.count("*") != 1:
            raise ValueError(f"layout: blocks is {self.blocks!r}; give one * for the number")
        _ = self._patterns

    def of(self, name: str, num_axes: int | None = None) -> TensorLayout:
        """The layout of one tensor; ValueError if none or several fit, or the axes' number not."""
        found = [(key, own) for key, pattern, own in self._patterns if pattern.fullmatch(name)]
        if len(found) != 1:
            said = ", ".join(repr(key) for key, _ in found) or "no line"
            raise ValueError(f"tensor {name!r}: {said} of the layout fits; exactly one must")
        ((key, own),) = found
        if num_axes is not None and num_axes != len(own.axes):
            raise ValueError(
                f"tensor {name!r} has {num_axes} axes, but the layout's {key!r} describes "
                f"{len(own.axes)}: {self.tensors[key]!r}"
            )
        return own

    def check_factors(self, factors: Mapping[str, int]) -> None:
        """ValueError unless the factors are whole numbers for dimensions that exist."""
        known = {axis.dimension for _, _, own in self._patterns for axis in own.axes}
        for dimension, factor in factors.items():
            if dimension not in known:
                raise ValueError(
                    f"no tensor has the dimension {dimension!r}; the layout knows "
                    f"{', '.join(sorted(known))}"
                )
            if not isinstance(factor, int) or factor < 1:
                raise ValueError(f"factor {factor!r} of {dimension!r}: give a whole number from 1")

    def block_of(self, name: str) -> tuple[int, str] | None:
        """The number of the tensor's block and the rest of its name; None outside of blocks."""
        found = self._block.fullmatch(name)
        return (int(found["number"]), found["rest"]) if found else None

    def in_block(self, number: int, rest: str) -> str:
        """The name of a tensor of a block: the inverse of `block_of`."""
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
