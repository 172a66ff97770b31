"""`python -m benchmarks spot`: policies replayed on Spot traces, goodput and cost of a deadline.

  python -m benchmarks spot --traces FOLDER                 every setting, and what plans count on
  python -m benchmarks spot --traces FOLDER --forecasts     forecasts and the traces left out
  python -m benchmarks spot --trace A.json B.json --fleet --deadline-hours 60

A trace is JSON as in skypilot-org/spot-traces: metadata with gap_seconds, and data, a list of 1
(a machine) and 0 (none).
Every policy has the same restarts and the same notices. The oracle knows the future and loses only
restarts; with a deadline its cost is a bound that no policy can beat.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.spot import forecast, settings
from benchmarks.spot.comparison import Question, compare
from benchmarks.spot.tables import draw, notes, table
from sizing.catalogue import Price
from sizing.cli.prices import add_price_arguments, ages, price_book
from sizing.cli.tables import print_json, show
from sizing.spot.traces import Trace, load_fleet, load_trace, statistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--traces", type=Path, metavar="FOLDER", help="every setting, on its .json")
    where.add_argument(
        "--trace", nargs="+", type=Path, metavar="FILE", help="one setting, on these"
    )
    parser.add_argument(
        "--forecasts", action="store_true", help="--traces: compare forecasts with traces left out"
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=Question().num_starts,
        metavar="N",
        help="jobs, spread over a trace (default: %(default)s)",
    )
    _add_question(parser.add_argument_group("the setting of --trace"))


def _add_question(parser: argparse._ArgumentGroup) -> None:
    asked = Question()
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
        ("--save-seconds", asked.save, "a full commit at a notice"),
        ("--notice-arrives", asked.notice_arrives, "share of losses with a notice"),
    ):
        shown = text if default is None else f"{text} (default: %(default)s)"
        parser.add_argument(name, type=float, default=default, metavar="N", help=shown)
    parser.add_argument("--size", default="g5.xlarge", help="for its prices (default: %(default)s)")
    add_price_arguments(parser)
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="write a bar chart to .svg or .png"
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print the tables."""
    if arguments.trace:
        return _one_setting(arguments)
    folder = arguments.traces
    rows = (
        forecast.measure(folder=folder)
        if arguments.forecasts
        else settings.measure(folder=folder, num_starts=arguments.starts)
    )
    counted = settings.count(folder)
    if arguments.json:
        print_json("spot", {"rows": rows, "traces": counted})
    else:
        show(rows)
        show(counted)
    return 0


def _one_setting(arguments: argparse.Namespace) -> int:
    paths = arguments.trace
    traces = [load_fleet(paths)] if arguments.fleet else [load_trace(path) for path in paths]
    costs = price_book(arguments).require(arguments.size)
    question = _make_question(arguments, *costs)
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
            "spot",
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


def _make_question(arguments: argparse.Namespace, on_demand: Price, spot: Price) -> Question:
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
