"""Traces of Spot availability, read and turned into the lives of machines.

The format is that of skypilot-org/spot-traces: `{"metadata": {"gap_seconds": n}, "data": [...]}`,
the number of available machines per tick. None are shipped.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotLife:
    """One machine, from the second it can start until it is gone; `pool` is its trace."""

    start: float
    end: float
    pool: int = 0

    @property
    def seconds(self) -> float:
        """Seconds that it lives."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """When a machine is available in one pool (or, joined, in one fleet)."""

    name: str
    seconds: float
    lives: tuple[SpotLife, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Losses per machine hour, and mean hours from a loss to the next machine."""

    losses: int
    machine_hours: float
    wait_hours: float

    @property
    def rate_per_hour(self) -> float:
        """Losses per machine hour."""
        return self.losses / self.machine_hours if self.machine_hours else 0.0


def load_trace(path: Path) -> Trace:
    """Read one trace file; a malformed one is a ValueError in one sentence."""
    gap, ticks = _read(path)
    return _trace(_short(path), [ticks], gap)


def load_fleet(paths: Sequence[Path]) -> Trace:
    """Read traces of the same time as the pools of one fleet that takes the first free one."""
    read = [_read(path) for path in paths]
    if len({(gap, len(ticks)) for gap, ticks in read}) != 1:
        raise ValueError("the traces of one fleet must have the same gap_seconds and length")
    gap = read[0][0]
    return _trace(f"fleet of {len(paths)} pools", [ticks for _, ticks in read], gap)


def _trace(name: str, pools: Sequence[Sequence[bool]], gap: float) -> Trace:
    """Join the pools; a trace without any machine is a ValueError."""
    lives = tuple(_lives(pools, gap))
    if not lives:
        raise ValueError(f"trace {name} has no machine at any time")
    return Trace(name=name, seconds=gap * len(pools[0]), lives=lives)


def statistics(traces: Sequence[Trace]) -> Statistics:
    """Count over several traces; a machine that outlives its trace does not count as lost."""
    losses, hours, waits, waited = 0, 0.0, 0, 0.0
    for trace in traces:
        hours += sum(life.seconds for life in trace.lives) / 3600
        losses += sum(life.end < trace.seconds for life in trace.lives)
        waits += max(0, len(trace.lives) - 1)
        waited += sum(b.start - a.end for a, b in pairwise(trace.lives)) / 3600
    return Statistics(
        losses=losses, machine_hours=hours, wait_hours=waited / waits if waits else 0.0
    )


def _short(path: Path) -> str:
    """Return zone and day of a trace named as in skypilot-org/spot-traces, else its name."""
    parts = path.stem.split("_")
    if len(parts) >= 4 and "-node" in parts[1]:
        day = parts[2].removeprefix("aws-")
        return f"{parts[3]} {day[:5]}"
    return path.stem


def _read(path: Path) -> tuple[float, list[bool]]:
    """Read the seconds between ticks, and whether each tick has a machine."""
    gap, counts = read_counts(path)
    return gap, [count > 0 for count in counts]


def read_counts(path: Path) -> tuple[float, list[float]]:
    """Read the seconds between ticks, and how many machines each tick has."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        gap, data = document["metadata"]["gap_seconds"], document["data"]
    except FileNotFoundError:
        raise ValueError(f"trace {path} does not exist") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not a trace: give JSON with metadata.gap_seconds and a list called data"
        ) from None
    if not isinstance(gap, int | float) or not 0 < gap < 1e6:
        raise ValueError(f"{path}: gap_seconds must be above 0 and below 1e6, got {gap!r}")
    if not isinstance(data, list) or not data:
        raise ValueError(f"{path}: data must be a list with at least one tick")
    for tick, count in enumerate(data):
        if isinstance(count, bool) or not isinstance(count, int | float) or not count >= 0:
            raise ValueError(f"{path}: tick {tick} must be a number of machines, got {count!r}")
    return float(gap), list(map(float, data))


def _lives(pools: Sequence[Sequence[bool]], gap: float) -> list[SpotLife]:
    """Stay in a pool until its machine is gone, then take the first pool that has one."""
    lives: list[SpotLife] = []
    held: int | None = None
    start = 0.0
    length = len(pools[0])
    for tick in range(length + 1):
        if held is not None and (tick == length or not pools[held][tick]):
            lives.append(SpotLife(start=start, end=tick * gap, pool=held))
            held = None
        if held is None and tick < length:
            held = next((index for index, pool in enumerate(pools) if pool[tick]), None)
            start = tick * gap
    return lives
