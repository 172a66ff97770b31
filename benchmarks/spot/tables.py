"""Policies on traces for people: a table, its notes, and a chart."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.spot.comparison import ORACLE, OURS, TODAY, PolicyRow, Question
from sizing.spot.traces import Statistics, Trace, statistics

FIGURES = {
    "goodput": "goodput on Spot, %",
    "cost": "cost with a deadline, %",
    "in_time": "done by the deadline, %",
}


def table(rows: Sequence[PolicyRow]) -> list[dict[str, Any]]:
    """Return one row for each figure and policy, with a column for each trace, and the mean."""
    lines = []
    for figure, text in FIGURES.items():
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


def notes(
    rows: Sequence[PolicyRow], traces: Sequence[Trace], question: Question, size: str
) -> list[str]:
    """Return what was asked, and what the traces are like."""
    asked = (
        f"{question.work_hours:g} h of work in {question.deadline_hours:g} h from "
        f"{question.num_starts} starts; restart {question.restart:g} s, periodic save "
        f"{question.checkpoint:g} s, commit at the notice {question.save:g} s; a notice precedes "
        f"{question.notice_arrives:.0%} of losses (assumed); {size}: "
        f"${question.on_demand_per_hour:g}/h, Spot ${question.spot_per_hour:g}/h."
    )
    lines = [
        asked,
        f"{OURS}: saves at the notice and trains on until the last safe moment, resets Young/Daly's"
        " interval after each loss, and falls back to on demand by expected cost.",
        f"{TODAY}: saves at the notice and trains on, with the trainer's reserves;"
        " resets Young's interval after each save, as the trainer does.",
        "cost: % of the on-demand cost of the work alone. With a deadline the policies without a"
        " notice use Spot until the last moment (greedy).",
    ]
    for trace in traces:
        seen = statistics([trace])
        lines.append(
            f"{trace.name}: a machine for {trace.available_share:.0%} of"
            f" {trace.seconds / 3600:,.0f} h,"
            f" lost every {_hours(seen)} h, {seen.wait_hours:.2f} h to the next."
        )
    if any(row.policy == ORACLE and row.cost is None for row in rows):
        lines.append("A trace shorter than the deadline has no costs.")
    return lines


def _hours(seen: Statistics) -> str:
    return f"{seen.machine_hours / seen.losses:.2f}" if seen.losses else "infinite"


def draw(rows: Sequence[PolicyRow], path: Path) -> None:
    """Draw goodput and cost of each policy on each trace as bars."""
    # Slow to import, and only needed here.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    traces = list(dict.fromkeys(row.trace for row in rows))
    # One colour for each policy in both halves.
    policies = [name for name in dict.fromkeys(row.policy for row in rows) if name != ORACLE]
    width = 0.8 / len(policies)
    for axes, name in zip(figure.subplots(2, 1), ("goodput", "cost"), strict=True):
        for place, policy in enumerate(policies):
            own = [row for row in rows if row.policy == policy and getattr(row, name) is not None]
            where = [traces.index(row.trace) + width * (place + 0.5) for row in own]
            heights = [100 * getattr(row, name) for row in own]
            axes.bar(where, heights, width, label=policy, color=f"C{place}")
        for row in rows:
            if row.policy == ORACLE and getattr(row, name) is not None:
                left, height = traces.index(row.trace), 100 * getattr(row, name)
                axes.hlines(height, left, left + 0.8, "black", label=ORACLE)
        axes.set_title(FIGURES[name], loc="left")
        axes.set_xticks([index + 0.4 for index in range(len(traces))], traces)
    # The lower half may be empty (no deadline fits the trace); together they have all names.
    known: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        known |= {label: handle for handle, label in zip(handles, labels, strict=True) if handle}
    figure.legend(known.values(), known.keys(), loc="outside right upper", fontsize="small")
    # The same figures give the same file: no date, no random ids.
    with rc_context({"svg.hashsalt": "simulate"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
