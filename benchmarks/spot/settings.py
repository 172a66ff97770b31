"""Policies on the public Spot traces, and the figures of sizing/spot/interruptions.py.

The traces (skypilot-org/spot-traces) are not shipped: give their folder with --traces.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.spot.comparison import ORACLE, PolicyRow, Question, compare
from sizing.spot.interruptions import interruptions
from sizing.spot.traces import Trace, load_fleet, load_trace, statistics

# What a periodic save and a commit cost: while training continues (as the trainer does), while it
# waits, and for a large model on a slow machine.
SETTINGS = {
    **{
        f"{hours} h of work in {1.5 * hours:g} h": Question(
            work_hours=hours, deadline_hours=1.5 * hours
        )
        for hours in (48, 12, 4, 2)
    },
    "save 15 s": Question(checkpoint=15.0),
    "save 60 s, restart 300 s": Question(checkpoint=60.0, save=60.0, restart=300.0),
    "tight: 48 h of work in 53 h": Question(deadline_hours=53.0),
    "the paper's delay: restart 720 s": Question(restart=720.0),
    "a call every 10 min": Question(tick=600.0),
    "Spot at 30 %": Question(spot_per_hour=0.3),
}
_FIGURES = {
    "goodput": "goodput on Spot, %",
    "cost": "cost with a deadline, %",
    "in_time": "done by the deadline, %",
}


def find_traces(folder: Path) -> list[Path]:
    """Return the traces of a folder by name; a folder without any is a ValueError."""
    found = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not found:
        raise ValueError(
            f"no traces in {folder}: skipped. Get the .json files of skypilot-org/spot-traces and "
            "give their folder with --traces FOLDER"
        )
    return found


def group_by_time(paths: Sequence[Path]) -> list[list[Path]]:
    """Group traces of the same time (the same length): they can be the pools of one fleet."""
    by_time: dict[float, list[Path]] = defaultdict(list)
    for path in paths:
        by_time[load_trace(path).seconds].append(path)
    return list(by_time.values())


def measure(*, folder: Path, num_starts: int) -> list[dict[str, Any]]:
    """Replay every policy in every setting; one row for each figure and policy."""
    if num_starts < 1:
        raise ValueError(f"--starts must be at least 1, got {num_starts}")
    traces = [load_trace(path) for path in find_traces(folder)]
    return [
        {"setting": name, **line}
        for name, question in SETTINGS.items()
        for line in table(compare(traces, replace(question, num_starts=num_starts)))
    ]


def table(rows: Sequence[PolicyRow]) -> list[dict[str, Any]]:
    """Return one row for each figure and policy, with a column for each trace, and the mean."""
    lines = []
    for figure, text in _FIGURES.items():
        for policy in dict.fromkeys(row.policy for row in rows):
            own = [row for row in rows if row.policy == policy]
            values = [getattr(row, figure) for row in own]
            if all(value is None for value in values) or (policy, figure) == (ORACLE, "in_time"):
                continue
            line: dict[str, Any] = {"figure": text, "policy": policy}
            line |= {row.trace: _percent([getattr(row, figure)]) for row in own}
            line["mean"] = _percent(values)
            line["points from oracle"] = _percent(
                getattr(row, f"{figure}_behind", None) for row in own
            )
            lines.append(line)
    return lines


def _percent(values: Iterable[float | None]) -> float | None:
    """Return the mean in percent, to a tenth."""
    known = [value for value in values if value is not None]
    return round(100 * sum(known) / len(known), 1) if known else None


def count(folder: Path) -> list[dict[str, Any]]:
    """Return losses and waits of each trace, of all, and of the zones of one time as one fleet."""
    paths = find_traces(folder)
    traces = [load_trace(path) for path in paths]
    fleets = [load_fleet(group) for group in group_by_time(paths) if len(group) > 1]
    groups: list[tuple[str, Sequence[Trace]]] = [(trace.name, [trace]) for trace in traces]
    groups += [(fleet.name, [fleet]) for fleet in fleets]
    means = [_typical("typical zone (geometric mean)", traces)]
    means += [_typical("typical fleet (geometric mean)", fleets)] if fleets else []
    planned = [
        {
            "what": f"planned with, {'one pool' if pools == 1 else 'several pools'}",
            "losses": None,
            "machine hours": None,
            "losses per machine hour": process.rate_per_hour,
            "hours to the next": process.wait_seconds / 3600,
        }
        for pools in (1, 2)
        for process in [interruptions(pools=pools)]
    ]
    return [_counted(name, group) for name, group in groups] + means + planned


def _counted(name: str, traces: Sequence[Trace]) -> dict[str, Any]:
    seen = statistics(traces)
    return {
        "what": name,
        "losses": seen.losses,
        "machine hours": seen.machine_hours,
        "losses per machine hour": seen.rate_per_hour,
        "hours to the next": seen.wait_hours,
    }


def _typical(name: str, traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the typical pool: the geometric mean."""
    seen = [statistics([trace]) for trace in traces]
    return {
        "what": name,
        "losses": sum(each.losses for each in seen),
        "machine hours": sum(each.machine_hours for each in seen),
        "losses per machine hour": middle([each.rate_per_hour for each in seen]),
        "hours to the next": middle([each.wait_hours for each in seen]),
    }


def middle(values: Sequence[float]) -> float:
    """The geometric mean of what is known: pools differ by factors."""
    known = [value for value in values if value > 0]
    return geometric_mean(known) if known else 0.0
