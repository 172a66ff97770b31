"""`python -m benchmarks spot`: policies replayed on Spot traces, goodput and cost of a deadline.

  python -m benchmarks spot --traces FOLDER                 every setting, and what plans count on
  python -m benchmarks spot --traces FOLDER --forecasts     forecasts and the traces left out

A trace is JSON as in skypilot-org/spot-traces: metadata with gap_seconds, and data, a list of 1
(a machine) and 0 (none).
Every policy has the same restarts and the same notices. The oracle knows the future and loses only
restarts; with a deadline its cost is a bound that no policy can beat.
"""

import argparse
from pathlib import Path

from benchmarks.spot import forecast, settings
from benchmarks.spot.comparison import Question
from sizing.cli.tables import print_json, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", required=True, help="replays its .json files"
    )
    parser.add_argument(
        "--forecasts", action="store_true", help="compare forecasts with traces left out"
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=Question().num_starts,
        metavar="N",
        help="jobs, spread over a trace (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print the tables."""
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
