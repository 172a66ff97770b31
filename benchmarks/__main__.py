"""`python -m benchmarks COMMAND`: measure, and print a table with the command and the machine."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
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
    growth,
    history,
    overhead,
    plan,
    s3,
    spot,
    sync,
    synth,
    walks,
)
from benchmarks.detection import table as detection
from benchmarks.gpu import table as gpu
from benchmarks.language import table as language
from benchmarks.loader import measure as loader
from benchmarks.program import measure as program
from sizing.cli import tables


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ours = commands.add_parser("synth", help="cdk synth of our app beside a plain-Node app")
    ours.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    start = commands.add_parser("boot", help="from power-on to the first optimizer step")
    start.add_argument("--machines", type=int, default=3, help="boots, default: %(default)s")
    start.add_argument(
        "--machine",
        choices=boot.MACHINES,
        default=boot.MACHINES[0],
        help="what boots (nspawn: Linux, root), default: %(default)s",
    )
    policies = commands.add_parser("spot", help="Spot policies on the public traces")
    hours = commands.add_parser("forecast", help="forecasts beside traces that are left out")
    for command in (policies, hours):
        command.add_argument("--traces", type=Path, required=True, help="folder of .json traces")
    policies.add_argument("--starts", type=int, default=100, help="jobs, default: %(default)s")
    saves = commands.add_parser("checkpoint", help="saves beside torch.save, safetensors and DCP")
    saves.add_argument("--rounds", type=int, default=7, help="alternating, default: %(default)s")
    saves.add_argument("--megabytes", type=int, default=512, help="default: %(default)s")
    saves.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    transfers = commands.add_parser("s3", help="uploads and downloads beside other clients of S3")
    transfers.add_argument("--rounds", type=int, default=5, help="alternating: %(default)s")
    transfers.add_argument("--megabytes", type=int, default=512, help="default: %(default)s")
    fetches = commands.add_parser("sync", help="a dataset from S3 to a folder beside others")
    fetches.add_argument("--rounds", type=int, default=5, help="alternating: %(default)s")
    fetches.add_argument("--files", type=int, default=3000, help="small ones: %(default)s")
    fetches.add_argument("--kilobytes", type=int, default=111, help="of each: %(default)s")
    fetches.add_argument("--large", type=int, default=4, help="large files: %(default)s")
    fetches.add_argument("--megabytes", type=int, default=256, help="of each: %(default)s")
    plans = commands.add_parser("plan", help="plans over all sizes and recipes")
    plans.add_argument("--calls", type=int, default=1000, help="default: %(default)s")
    cached = commands.add_parser("cached", help="frozen features cached or computed every epoch")
    cached.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    cached.add_argument("--clips", type=int, default=128, help="default: %(default)s")
    loops = commands.add_parser("overhead", help="a step of our loop beside a bare PyTorch loop")
    loops.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    loops.add_argument("--width", type=int, default=60_000, help="of the model; sets the step time")
    device = commands.add_parser("gpu", help="what only a GPU can say, in one call")
    device.add_argument("--cpu", action="store_true", help="a dry run without one, tiny sizes")
    device.add_argument("--seconds", type=float, default=450.0, help="default: %(default)s")
    device.add_argument("--only", nargs="+", default=[], metavar="NAME", help="default: all of it")
    words = commands.add_parser("language", help="the growing model's phases beside peers")
    words.add_argument("--scale", help="tiny, eighth, quarter or full (default: full on a GPU)")
    words.add_argument("--phases", nargs="+", default=[], metavar="NAME", help="default: all")
    boxes = commands.add_parser("detection", help="deformable attention and steps beside peers")
    boxes.add_argument("--scale", help="tiny, laptop, half, reference or reference_pair")
    boxes.add_argument("--parts", nargs="+", default=[], metavar="NAME", help="default: all")
    boxes.add_argument("--compiled", action="store_true", help="torch.compile on a CPU, too")
    for command in (words, boxes):
        command.add_argument("--rounds", type=int, default=5, help="on a CPU: %(default)s")
        command.add_argument("--cpu", action="store_true", help="even if there is a GPU")
        command.add_argument("--seconds", type=float, default=450.0, help="on a GPU: %(default)s")
    images = commands.add_parser("loader", help="our loader beside others and what cores decode")
    images.add_argument("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    images.add_argument("--images", type=int, default=4000, help="a round, default: %(default)s")
    images.add_argument("--batch", type=int, default=64, help="default: %(default)s")
    images.add_argument("--workers", type=int, help="processes (default: one per core)")
    images.add_argument("--only", nargs="+", default=[], metavar="NAME", help="default: all")
    orders = commands.add_parser("bookkeeping", help="an epoch's orders, steps and digests")
    orders.add_argument("--samples", type=int, default=1_281_167, help="default: %(default)s")
    orders.add_argument("--batch", type=int, default=256, help="default: %(default)s")
    lines = commands.add_parser("history", help="metrics of a long run: bytes, memory, seconds")
    lines.add_argument("--steps", type=int, default=450_450, help="default: %(default)s")
    programs = commands.add_parser("program", help="a program's checkpoints beside aws s3 sync")
    programs.add_argument("--lives", type=int, default=20, help="machines lost: %(default)s")
    programs.add_argument("--megabytes", type=int, default=16, help="per file: %(default)s")
    programs.add_argument("--steps", type=int, default=100, help="per checkpoint: %(default)s")
    grows = commands.add_parser("growth", help="a model that grows beside one from scratch")
    grows.add_argument("--count", type=int, default=12_000, help="stories, default: %(default)s")
    grows.add_argument(
        "--rates", type=float, nargs="+", default=[3e-3, 6e-3], help="default: %(default)s"
    )
    grows.add_argument("--folder", type=Path, help="keep the runs there, and go on with them")
    grows.add_argument("--picture", type=Path, help="an .svg of the curves to write")
    commands.add_parser("walks", help="files and functions of a start, a save, a notice")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(arguments)


# By command: what gives its rows.
_MEASURES: Mapping[str, Callable[[argparse.Namespace], Sequence[dict[str, Any]]]] = {
    "synth": lambda given: synth.measure(rounds=given.rounds),
    "boot": lambda given: boot.measure(machines=given.machines, machine=given.machine),
    "spot": lambda given: spot.measure(folder=given.traces, num_starts=given.starts),
    "forecast": lambda given: forecast.measure(folder=given.traces),
    "checkpoint": lambda given: checkpoint.columns(
        checkpoint.measure(rounds=given.rounds, megabytes=given.megabytes, folder=given.folder)
    ),
    "s3": lambda given: checkpoint.columns(
        s3.measure(rounds=given.rounds, megabytes=given.megabytes)
    ),
    "sync": lambda given: sync.measure(
        rounds=given.rounds,
        files=given.files,
        kilobytes=given.kilobytes,
        large=given.large,
        megabytes=given.megabytes,
    ),
    "plan": lambda given: plan.measure(calls=given.calls),
    "cached": lambda given: cached_features.measure(rounds=given.rounds, clips=given.clips),
    "overhead": lambda given: overhead.measure(rounds=given.rounds, width=given.width),
    "gpu": lambda given: gpu.measure(seconds=given.seconds, cpu=given.cpu, only=given.only),
    "language": lambda given: language.measure(
        scale=given.scale,
        rounds=given.rounds,
        phases=given.phases,
        cpu=given.cpu,
        seconds=given.seconds,
    ),
    "detection": lambda given: detection.measure(
        scale=given.scale,
        rounds=given.rounds,
        parts=given.parts,
        cpu=given.cpu,
        compiled=given.compiled,
        seconds=given.seconds,
    ),
    "loader": lambda given: loader.measure(
        rounds=given.rounds,
        images=given.images,
        batch=given.batch,
        workers=given.workers,
        only=given.only,
    ),
    "bookkeeping": lambda given: bookkeeping.measure(samples=given.samples, batch=given.batch),
    "history": lambda given: history.measure(steps=given.steps),
    "program": lambda given: checkpoint.columns(
        program.measure(num_lives=given.lives, megabytes=given.megabytes, steps=given.steps)
    ),
    "growth": lambda given: growth.measure(
        count=given.count, rates=given.rates, folder=given.folder, picture=given.picture
    ),
    "walks": lambda given: walks.measure(),
}


def main() -> int:
    """Run one benchmark and print what it measured."""
    arguments = parse_arguments()
    try:
        rows = _MEASURES[arguments.command](arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    elif arguments.command in ("spot", "forecast"):
        tables.show(rows, title=machine())
        tables.show(spot.count(arguments.traces))
    else:
        show(arguments.command, rows)
    return 0


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
