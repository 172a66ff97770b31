"""`python -m benchmarks COMMAND`: measure, and print a table with the command and the machine."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import (
    bookkeeping,
    boot,
    cached_features,
    checkpoint,
    forecast,
    loader,
    overhead,
    plan,
    spot,
    synth,
    walks,
)
from sizing.cli import tables


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ours = commands.add_parser("synth", help="cdk synth of our app beside a plain-Node app")
    ours.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    start = commands.add_parser("boot", help="time from user data to the first optimizer step")
    start.add_argument("--machines", type=int, default=3, help="boots, default: %(default)s")
    policies = commands.add_parser("simulate", help="Spot policies on the public traces")
    hours = commands.add_parser("forecast", help="forecast hours beside the public traces")
    for command in (policies, hours):
        command.add_argument("--traces", type=Path, required=True, help="folder of .json traces")
        command.add_argument("--starts", type=int, default=100, help="jobs, default: %(default)s")
    saves = commands.add_parser("checkpoint", help="saves beside torch.save, safetensors and DCP")
    saves.add_argument("--rounds", type=int, default=7, help="alternating, default: %(default)s")
    saves.add_argument("--megabytes", type=int, default=512, help="default: %(default)s")
    saves.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    plans = commands.add_parser("plan", help="plans over all sizes and recipes")
    plans.add_argument("--calls", type=int, default=1000, help="default: %(default)s")
    cached = commands.add_parser("cached", help="frozen features cached or computed every epoch")
    cached.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    cached.add_argument("--clips", type=int, default=128, help="default: %(default)s")
    loops = commands.add_parser("overhead", help="a step of our loop beside a bare PyTorch loop")
    loops.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    loops.add_argument("--width", type=int, default=60_000, help="of the model; sets the step time")
    images = commands.add_parser("loader", help="our loader beside others and what cores decode")
    images.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    images.add_argument("--images", type=int, default=2000, help="a round, default: %(default)s")
    images.add_argument("--batch", type=int, default=64, help="default: %(default)s")
    images.add_argument("--workers", type=int, help="processes (default: one per core)")
    orders = commands.add_parser("bookkeeping", help="an epoch's orders, steps and digests")
    orders.add_argument("--samples", type=int, default=1_281_167, help="default: %(default)s")
    orders.add_argument("--batch", type=int, default=256, help="default: %(default)s")
    commands.add_parser("walks", help="files and functions of a start, a save, a notice")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(arguments)


def main() -> int:
    """Run one benchmark and print what it measured."""
    arguments = parse_arguments()
    if arguments.command == "synth":
        rows = synth.measure(rounds=arguments.rounds)
    elif arguments.command == "cached":
        rows = cached_features.measure(rounds=arguments.rounds, clips=arguments.clips)
    elif arguments.command == "overhead":
        rows = overhead.measure(rounds=arguments.rounds, width=arguments.width)
    elif arguments.command in ("loader", "bookkeeping"):
        rows = _of_samples(arguments)
    elif arguments.command == "walks":
        rows = walks.measure()
    elif arguments.command == "plan":
        rows = plan.measure(calls=arguments.calls)
    elif arguments.command in ("simulate", "forecast"):
        replayed = spot if arguments.command == "simulate" else forecast
        try:
            rows = replayed.measure(folder=arguments.traces, num_starts=arguments.starts)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        if not arguments.json:
            tables.show(rows, title=machine())
            tables.show(spot.count(arguments.traces))
            return 0
    elif arguments.command == "checkpoint":
        found = checkpoint.measure(
            rounds=arguments.rounds, megabytes=arguments.megabytes, folder=arguments.folder
        )
        rows = checkpoint.columns(found)
    else:
        rows = boot.measure(machines=arguments.machines)
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    else:
        show(arguments.command, rows)
    return 0


def _of_samples(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.command == "bookkeeping":
        return bookkeeping.measure(samples=arguments.samples, batch=arguments.batch)
    return loader.measure(
        rounds=arguments.rounds,
        images=arguments.images,
        batch=arguments.batch,
        workers=arguments.workers,
    )


def machine() -> str:
    """Return the machine in one line, for the log."""
    return f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} logical CPUs"


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    table = Table(title=f"{title} ({machine()})", title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == next(iter(rows[0])) else "right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
