"""Traces of Spot availability, read and turned into the lives of machines.

The format is that of skypilot-org/spot-traces: `{"metadata": {"gap_seconds": n}, "data": [...]}`,
the number of available machines per tick. None are shipped.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotLife:
    """One machine, from the second when it can start until it is gone."""

    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The times when a machine is available in one pool."""

    name: str
    seconds: float
    lives: tuple[SpotLife, ...]


def load_trace(path: Path) -> Trace:
    """Read one trace file; a malformed one, or one without a machine, is a ValueError."""
    gap, counts = read_spot_counts(path)
    lives = tuple(_lives(counts, gap))
    if not lives:
        raise ValueError(f"trace {_short(path)} has no machine at any time")
    return Trace(name=_short(path), seconds=gap * len(counts), lives=lives)


def _lives(counts: Sequence[float], gap: float) -> Iterator[SpotLife]:
    """Yield the lives; a life is a series of ticks with a machine."""
    end = 0
    for has_machine, ticks in groupby(count > 0 for count in counts):
        start, end = end, end + len(list(ticks))
        if has_machine:
            yield SpotLife(start=start * gap, end=end * gap)


def _short(path: Path) -> str:
    """Return zone and day of a trace named as in skypilot-org/spot-traces, else its name."""
    parts = path.stem.split("_")
    if len(parts) >= 4 and "-node" in parts[1]:
        day = parts[2].removeprefix("aws-")
        return f"{parts[3]} {day[:5]}"
    return path.stem


def read_spot_counts(path: Path) -> tuple[float, list[float]]:
    """Read the seconds between ticks, and how many machines each tick has."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        gap, data = document["metadata"]["gap_seconds"], document["data"]
    except FileNotFoundError:
        raise ValueError(f"trace {path} does not exist") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not a trace: use JSON with metadata.gap_seconds and a list called data"
        ) from None
    if not isinstance(gap, int | float) or not 0 < gap < 1e6:
        raise ValueError(f"{path}: gap_seconds must be above 0 and below 1e6, got {gap!r}")
    if not isinstance(data, list) or not data:
        raise ValueError(f"{path}: data must be a list with at least one tick")
    for tick, count in enumerate(data):
        if isinstance(count, bool) or not isinstance(count, int | float) or not count >= 0:
            raise ValueError(f"{path}: tick {tick} must be a number of machines, got {count!r}")
    return float(gap), list(map(float, data))
