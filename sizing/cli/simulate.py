"""Replay policies on traces of Spot availability: goodput, and the cost of a deadline.

  python -m sizing simulate --trace TRACE.json ...
  python -m sizing simulate --trace A.json B.json C.json --fleet --deadline-hours 60

A trace is JSON as in skypilot-org/spot-traces: metadata with gap_seconds, and data, a list of 1
(a machine) and 0 (none).
Every policy has the same restarts and the same notices. The oracle knows the future and loses only
restarts; with a deadline its cost is a bound that no policy can beat.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from sizing import catalogue
from sizing.catalogue import Price
from sizing.cli.prices import add_price_arguments, ages, answers_of_aws, prices_of
from sizing.cli.tables import print_json, show
from sizing.policies.comparison import ORACLE, OURS, TODAY, Question, Row, compare
from sizing.spot.traces import Statistics, Trace, load_fleet, load_trace, statistics

HELP = "checkpoint and fallback policies replayed on Spot traces"
FIGURES = {
    "goodput": "goodput on Spot, %",
    "cost": "cost with a deadline, %",
    "in_time": "done by the deadline, %",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    asked = Question()
    parser.add_argument("--trace", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="the traces are the pools of one fleet at the same time",
    )
    for name, default, text in (
        ("--work-hours", asked.work_hours, "training that the job needs"),
        ("--deadline-hours", None, "from start to end (default: 1.5 times the work)"),
        ("--restart-seconds", asked.restart, "boot, sync and resume of a replacement"),
        ("--checkpoint-seconds", asked.checkpoint, "GPU wait of a periodic save"),
        ("--save-seconds", asked.save, "a whole commit at a notice"),
        ("--notice-arrives", asked.notice_arrives, "share of losses with a notice"),
    ):
        shown = text if default is None else f"{text} (default: %(default)s)"
        parser.add_argument(name, type=float, default=default, metavar="N", help=shown)
    parser.add_argument("--size", default="g5.xlarge", help="for its prices (default: %(default)s)")
    add_price_arguments(parser)
    parser.add_argument(
        "--starts",
        type=int,
        default=asked.num_starts,
        metavar="N",
        help="jobs, spread over the trace (default: %(default)s)",
    )
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="write a bar chart to .svg or .png"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print one table."""
    traces = read_traces(arguments.trace, is_fleet=arguments.fleet)
    costs = known_prices(arguments)
    question = make_question(arguments, *costs)
    if arguments.chart and arguments.chart.suffix not in (".svg", ".png"):
        raise ValueError(f"--chart takes a file ending in .svg or .png, got {arguments.chart}")
    # A trace takes seconds; progress is shown on a terminal only.
    screen = Console(stderr=True)
    seen = track(
        traces, "replaying", console=screen, transient=True, disable=not screen.is_terminal
    )
    rows = compare(seen, question)
    if arguments.chart:
        draw(rows, arguments.chart)
    if arguments.json:
        print_json(
            "simulate",
            {
                "question": asdict(question),
                "size": arguments.size,
                "traces": [_describe(trace) for trace in traces],
                "rows": [asdict(row) for row in rows],
            },
        )
    else:
        show(table(rows), notes=[*notes(rows, traces, question, arguments.size), ages(costs)])
    return 0


def read_traces(paths: Sequence[Path], *, is_fleet: bool) -> list[Trace]:
    """Read the traces, each as one zone or all as one fleet."""
    return [load_fleet(paths)] if is_fleet else [load_trace(path) for path in paths]


def known_prices(arguments: argparse.Namespace) -> tuple[Price, Price]:
    """Return on-demand and Spot price of the size; a ValueError where one is not known."""
    size, region = arguments.size, arguments.region
    on_demand, spot = prices_of(arguments, size, answers_of_aws(arguments))
    return (
        on_demand or catalogue.hourly_price(size, region),
        spot or catalogue.spot_price(size, region, arguments.zone),
    )


def make_question(arguments: argparse.Namespace, on_demand: Price, spot: Price) -> Question:
    """Return what the options ask, at these prices."""
    deadline = arguments.deadline_hours
    return Question(
        work_hours=arguments.work_hours,
        deadline_hours=1.5 * arguments.work_hours if deadline is None else deadline,
        restart=arguments.restart_seconds,
        checkpoint=arguments.checkpoint_seconds,
        save=arguments.save_seconds,
        notice_arrives=arguments.notice_arrives,
        spot_per_hour=spot.usd_per_hour,
        on_demand_per_hour=on_demand.usd_per_hour,
        num_starts=arguments.starts,
    )


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
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


def notes(rows: Sequence[Row], traces: Sequence[Trace], question: Question, size: str) -> list[str]:
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


def _describe(trace: Trace) -> dict[str, Any]:
    """Return a trace's figures."""
    seen = statistics([trace])
    return {
        "name": trace.name,
        "hours": trace.seconds / 3600,
        "available_share": trace.available_share,
        "losses": seen.losses,
        "rate_per_machine_hour": seen.rate_per_hour,
        "wait_hours": seen.wait_hours,
    }


def draw(rows: Sequence[Row], path: Path) -> None:
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
