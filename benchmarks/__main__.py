"""`python -m benchmarks COMMAND`: measure, and print a table with the command and the machine."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import evidence, house, walks
from benchmarks.gpu import table as gpu
from benchmarks.kills import command as kills
from benchmarks.loader import measure as loader
from benchmarks.spot import command as spot
from sizing.cli.tables import show


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    policies = commands.add_parser(
        "spot",
        help="Spot policies on the public traces",
        description=spot.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    spot.add_arguments(policies)
    device = commands.add_parser("gpu", help="what only a GPU can say, in one call")
    device.add_argument("--cpu", action="store_true", help="a dry run without one, tiny sizes")
    device.add_argument("--seconds", type=float, default=450.0, help="default: %(default)s")
    device.add_argument("--only", nargs="+", default=[], metavar="NAME", help="default: all of it")
    images = commands.add_parser("loader", help="our loader, others, and what cores decode")
    images.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    images.add_argument("--images", type=int, default=4000, help="a round, default: %(default)s")
    images.add_argument("--batch", type=int, default=64, help="default: %(default)s")
    images.add_argument("--workers", type=int, help="processes (default: one per core)")
    images.add_argument("--only", nargs="+", default=[], metavar="NAME", help="default: all")
    kills.add_arguments(
        commands.add_parser(
            "kill_table",
            help="public trainers and save habits, killed on purpose",
            description=kills.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    evidence.add_arguments(
        commands.add_parser(
            "evidence",
            help="the seed documents' numbers and ours; the fit of sizing's constants",
            description=evidence.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    walked = commands.add_parser("walks", help="files and functions of a start, a save, a notice")
    walked.add_argument(
        "--tree", type=Path, help="instead, lines, names and options of the checkout in this folder"
    )
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(arguments)


# By command: what prints more than rows, and what gives the rows of the others.
_PRINTS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "spot": spot.run,
    "evidence": evidence.run,
}
_MEASURES: Mapping[str, Callable[[argparse.Namespace], Sequence[dict[str, Any]]]] = {
    "gpu": lambda given: gpu.measure(seconds=given.seconds, cpu=given.cpu, only=given.only),
    "loader": lambda given: loader.measure(
        rounds=given.rounds,
        images=given.images,
        batch=given.batch,
        workers=given.workers,
        only=given.only,
    ),
    "kill_table": kills.measure,
    "walks": lambda given: house.measure(given.tree) if given.tree else walks.measure(),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one benchmark and print what it measured."""
    arguments = parse_arguments(words)
    try:
        if prints := _PRINTS.get(arguments.command):
            return prints(arguments)
        rows = _MEASURES[arguments.command](arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    else:
        show(rows, title=f"{arguments.command} ({machine()})")
    return int(arguments.command == "kill_table" and kills.is_damaged(rows))


def machine() -> str:
    """Return the machine in one line, for the log."""
    return f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} logical CPUs"


if __name__ == "__main__":
    sys.exit(main())
