"""The options of `python -m training run`, and the types that other commands share with it."""

import argparse
import math
import socket
from pathlib import Path

from contract.notice import MAX_SECONDS, POLICIES


def add(parser: argparse.ArgumentParser) -> None:
    """Add every option, in the order in which --help shows them."""
    _add_what(parser)
    _add_saving(parser)
    _add_limits(parser)
    _add_records(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    """What is trained, on what, and where it is kept."""
    add = parser.add_argument
    add("--workload", required=True, help="a known name, or your own as package.module:NAME")
    add("--recipe", required=True, help="a named config of the workload")
    add(
        "--override",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set one field of the config; may be given several times",
    )
    add("--dataset-uri", required=True, help="a folder, or s3://bucket/prefix (synced first)")
    add("--run-uri", required=True, help="where the run is kept: s3://bucket/prefix, or a folder")
    add(
        "--artifacts-uri",
        metavar="URI",
        help="a folder or prefix where runs share derived data, for those who may write there",
    )
    add(
        "--init-from",
        metavar="URI",
        help="begin with the weights of a finished run or of a .safetensors file",
    )
    add(
        "--extend-to",
        metavar="8epochs|4000steps",
        help="with --init-from RUN: a new run that goes on where that one finished, optimizer "
        "and all, until its last stage has trained so long",
    )
    add("--run-id", help="default: the last part of the run URI")


def _add_saving(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, and how long the machine and a silent holder are given."""
    add = parser.add_argument
    add(
        "--checkpoint-interval",
        default="2epochs",
        metavar="auto|2epochs|100steps|600s",
        help="how often to commit (default: %(default)s)",
    )
    add(
        "--keep",
        default="3",
        metavar="3|3,10epochs|3,5000steps",
        help="checkpoints that stay: the newest, and the first of every so many; each stage's best "
        "and what is still needed stay too (default: %(default)s)",
    )
    add(
        "--notice-budget-seconds",
        type=positive,
        default=float(MAX_SECONDS),
        help="time from a notice to the end of the machine (default: %(default)s)",
    )
    add("--notice-file", type=Path, help="JSON with the notice's time, written by the handler")
    add(
        "--notice-policy",
        choices=POLICIES,
        default="train-on",
        help="after the commit at a notice whose time is known: train on and commit once more as "
        "late as is safe, or stop (default: %(default)s)",
    )
    add(
        "--lease-ttl-seconds",
        type=positive,
        default=30.0,
        help="how long a silent holder is waited for (default: %(default)s)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """What the run may take of its machine."""
    add = parser.add_argument
    add(
        "--memory-limit-mib",
        type=positive_int,
        help="most memory of the GPU that this run may take; without a GPU, what its process may "
        "take beyond what it starts with (default: all there is)",
    )
    add(
        "--no-adapt",
        action="store_true",
        help="do not try at the start whether memory suffices, nor change anything so that it does",
    )
    add(
        "--num-processes",
        type=count_or_auto,
        metavar="N|auto",
        help="processes that train together on this machine (default: auto, one per GPU)",
    )
    add(
        "--watchdog-seconds",
        type=float,
        default=600.0,
        help="a trainer silent for so long shows its stacks and exits 1; 0: never "
        "(default: %(default)s)",
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    """What is kept beside checkpoints, and what is written into the run's record."""
    add = parser.add_argument
    add(
        "--profile",
        type=positive_int,
        metavar="N",
        help="keep a torch.profiler trace of N steps after a warm-up in the run, under profiles/",
    )
    add(
        "--usd-per-hour",
        type=positive,
        help="the machine's price, to show the attempt's dollars so far and in the report "
        "(default: usd_spot_per_hour of --prediction, if it is there)",
    )
    add("--metrics-file", type=Path, help="also append the metrics to this local file")
    add("--writer", default=socket.gethostname(), help="this machine's name (an instance id)")
    add("--bundle-uri", help="the code bundle, for config.json")
    add("--prediction", default="", help="NAME=VALUE words of the plan, for config.json")
    add("--scratch", type=Path, help="local folder for downloads (default: a temporary one)")


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return value


def positive_int(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def count_or_auto(text: str) -> int | None:
    """A whole number above 0; None for "auto"."""
    if text == "auto":
        return None
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number from 1 on")
    return int(text)
