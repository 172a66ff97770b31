"""The one parser of what users write: intervals, checkpoints to keep, counts.

The command line, the stack parameters, run.env and the plan accept the same text and refuse it with
the same sentence.
"""

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, cast

from contract.errors import UserError

_Value = TypeVar("_Value")

Unit: TypeAlias = Literal["epochs", "steps", "s", "auto"]
SpanUnit: TypeAlias = Literal["epochs", "steps"]

_SPAN = r"(?P<value>0*[1-9][0-9]*)(?P<unit>epoch|step)s?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Time between two commits: epochs of a stage, steps of the run, or seconds.

    `auto` commits as often as pays (contract.auto_interval).
    """

    value: float
    unit: Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A number of epochs of a stage, or of steps of the run."""

    value: int
    unit: SpanUnit


def parse_interval(text: str) -> Interval:
    """Read `auto`, `2epochs`, `100steps` or `600s` (only seconds may have a fraction)."""
    stripped = text.strip()
    if stripped == "auto":
        return Interval(value=0, unit="auto")
    seconds = re.fullmatch(r"([0-9]+(\.[0-9]+)?)s", stripped)
    if seconds and float(seconds[1]) > 0:
        return Interval(value=float(seconds[1]), unit="s")
    span = parse_span(stripped)
    if span is None:
        raise UserError(
            f"the checkpoint interval {text!r} cannot be read; "
            "write auto, 2epochs, 100steps or 600s"
        )
    return Interval(value=span.value, unit=span.unit)


def parse_kept(text: str) -> tuple[int, Span | None]:
    """Read `3` or `3,10epochs`: how many of the newest to keep, and the first of each span."""
    match = re.fullmatch(rf"(?P<newest>[1-9][0-9]*)(,(?P<span>{_SPAN}))?", text)
    if not match:
        raise UserError(
            f"the checkpoints to keep, {text!r}, cannot be read; write 3, 3,10epochs or "
            "3,5000steps: the newest three, and the first of every 10 epochs or 5000 steps"
        )
    return int(match["newest"]), parse_span(match["span"] or "")


def parse_span(text: str) -> Span | None:
    """Read `8epochs` or `4000steps`; None for anything else."""
    match = re.fullmatch(_SPAN, text)
    if not match:
        return None
    return Span(value=int(match["value"]), unit=cast(SpanUnit, match["unit"] + "s"))


def parse_positive(text: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{text} is not a positive number")
    return value


def parse_seconds(text: str) -> float:
    """Read a number of seconds, 0 or more."""
    return 0.0 if re.fullmatch(r"0+(\.0*)?", text) else parse_positive(text)


def parse_count(text: str) -> int:
    """Read a whole number, 0 or more."""
    if not re.fullmatch("[0-9]+", text):
        raise UserError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def parse_positive_count(text: str) -> int:
    """Read a whole number above 0."""
    number = parse_count(text)
    if number == 0:
        raise UserError(f"{text} is not positive")
    return number


def parse_writer(text: str) -> str:
    """Read a machine's name, which is part of the keys of its events; SageMaker's has a /."""
    if not re.fullmatch(r"[^/\s]+(/[^/\s]+)?", text) or len(text) > 200:
        raise UserError(f"{text!r} is not a machine's name; use 1 to 200 characters, no spaces")
    return text


def parse_place(text: str) -> str:
    """Read a folder's name or an address; as a path, an empty one would be the current folder."""
    if not text:
        raise UserError("it is empty; name a folder (. is the current one)")
    return text


def argument_type(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Make argparse report a reader's own message about a wrong value."""

    def typed(text: str) -> _Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed
