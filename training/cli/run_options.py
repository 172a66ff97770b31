"""The options of `python -m training run`, and the types that other commands share with it."""

import argparse
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from contract.grammar import parse_count, parse_interval, parse_positive, parse_positive_count
from contract.notice import MAX_SECONDS
from contract.trainer_options import OPTIONS
from training.cli import run_program
from training.errors import UserError
from training.store.open import open_store
from training.store.protocol import Store

if TYPE_CHECKING:
    from training.engine.job import RunOptions

_Value = TypeVar("_Value")


def add(parser: argparse.ArgumentParser) -> None:
    """Add every option, in the order in which --help shows them."""
    _add_what(parser)
    _add_trainer_options(parser)
    _add_notice(parser)
    _add_limits(parser)
    _add_records(parser)
    run_program.add(parser)


def refuse_missing(arguments: argparse.Namespace) -> None:
    """UserError unless it is said what to train, and on what."""
    for name in ("workload", "recipe", "dataset_uri"):
        if getattr(arguments, name) is None:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} is missing; give --workload, --recipe and --dataset-uri, "
                "or --program and --source for a program of your own"
            )


def import_from(source: Path | None) -> None:
    """Let this process, and those that it starts, import a workload of one's own from a folder."""
    if source is None:
        return
    if not source.is_dir():
        raise UserError(f"the source folder {source} does not exist; check --source")
    folder = str(source.resolve())
    # Not first: what is called `training` in the folder must not hide the trainer.
    sys.path.insert(1, folder)
    others = filter(None, [os.environ.get("PYTHONPATH"), folder])
    os.environ["PYTHONPATH"] = os.pathsep.join(others)


def attempt_options(arguments: argparse.Namespace, store: Store, scratch: Path) -> dict[str, Any]:
    """What every attempt is asked for (`AttemptOptions`), by name."""
    from training.attempt.attempt import AttemptOptions
    from training.record.checkpoint_entry import parse_retention
    from training.record.run_config import parse_prediction, planned_price

    prediction = parse_prediction(arguments.prediction)
    return {
        **_by_name(arguments, AttemptOptions),
        "store": store,
        "run_id": arguments.run_id or store.uri.rstrip("/").rpartition("/")[2],
        "retention": parse_retention(arguments.keep),
        "scratch": scratch,
        "prediction": prediction,
        "usd_per_hour": arguments.usd_per_hour or planned_price(prediction),
    }


def parse(
    arguments: argparse.Namespace, store: Store, scratch: Path, environ: Mapping[str, str]
) -> "RunOptions":
    """The options of one attempt: what argparse has read, by name, and what has a grammar."""
    from training.attempt.world import RankEnvironment
    from training.config import parse_overrides
    from training.engine.job import RunOptions

    parsed = {
        "overrides": parse_overrides(arguments.override),
        "artifacts": open_store(arguments.artifacts_uri) if arguments.artifacts_uri else None,
        "interval": parse_interval(arguments.checkpoint_interval),
        "profile_steps": arguments.profile,
        "environment": RankEnvironment.from_environment(environ),
    }
    common = attempt_options(arguments, store, scratch)
    return RunOptions(**{**_by_name(arguments, RunOptions), **common, **parsed})


def _by_name(arguments: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """What argparse has read for the fields of a dataclass."""
    names = {field.name for field in fields(options)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _add_what(parser: argparse.ArgumentParser) -> None:
    """Add what is trained, on what, and where it is kept."""
    add = parser.add_argument
    add("--workload", help="a known name, or your own as package.module:NAME")
    add("--recipe", help="a named config of the workload")
    add(
        "--override",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set one field of the config; may be given several times",
    )
    add("--dataset-uri", help="a folder, or s3://bucket/prefix (synced first)")
    add("--run-uri", required=True, help="where the run is kept: s3://bucket/prefix, or a folder")
    add(
        "--artifacts-uri",
        metavar="URI",
        help="a folder or prefix where runs share derived data, for those who may write there",
    )
    add(
        "--init-from",
        metavar="URI",
        help="start with the weights of a finished run or of a .safetensors file",
    )
    add(
        "--extend-to",
        metavar="8epochs|4000steps",
        help="with --init-from RUN: a new run that continues where that one finished, optimizer "
        "state included, until its last stage has trained that long",
    )
    add("--run-id", help="default: the last part of the run URI")


def _add_trainer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that a stack may set too (contract/trainer_options.py)."""
    for option in OPTIONS.values():
        shown = "" if option.default is None else " (default: %(default)s)"
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            type=_argument_type(option.read),
            default=option.default,
            metavar=option.form,
            help=option.means + shown,
        )


def _add_notice(parser: argparse.ArgumentParser) -> None:
    """Add what the machine says of its end."""
    add = parser.add_argument
    add(
        "--notice-budget-seconds",
        type=positive,
        default=float(MAX_SECONDS),
        help="time from a notice to the end of the machine (default: %(default)s)",
    )
    add("--notice-file", type=Path, help="JSON with the notice's time, written by the handler")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the limits on what the run takes of its machine."""
    add = parser.add_argument
    add(
        "--memory-limit-mib",
        type=positive_int,
        help="the most GPU memory that this run may use; without a GPU, what its process may use "
        "beyond what it starts with (default: no limit)",
    )
    add(
        "--no-adapt",
        action="store_true",
        help="do not test at the start whether memory suffices, and change nothing to make it fit",
    )
    add(
        "--keep-compiled",
        action="store_true",
        help="keep what torch.compile makes in the run's store, for replacements; it is code that "
        "they run, so only where nobody else writes to that store",
    )
    add(
        "--num-processes",
        type=_count_or_auto,
        metavar="N|auto",
        help="processes that train together on this machine: 1, 2, 4 or 8 (default: auto, one per "
        "GPU, as far as a step's micro-batches go round)",
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    """Add what is kept beside checkpoints, and what goes into the run's record."""
    add = parser.add_argument
    add(
        "--usd-per-hour",
        type=positive,
        help="the machine's price, for the attempt's cost so far and in the report "
        "(default: usd_spot_per_hour of --prediction, if given)",
    )
    add("--metrics-file", type=Path, help="also append the metrics to this local file")
    add("--writer", default=socket.gethostname(), help="this machine's name (an instance id)")
    add("--bundle-uri", help="the code bundle, for config.json")
    add("--prediction", default="", help="NAME=VALUE words of the plan, for config.json")
    add("--scratch", type=Path, help="local folder for downloads (default: a temporary one)")


def _argument_type(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Let argparse say what a reader says of a wrong value."""

    def typed(text: str) -> _Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


positive = _argument_type(parse_positive)
positive_int = _argument_type(parse_positive_count)
count = _argument_type(parse_count)


def _count_or_auto(text: str) -> int | None:
    """Parse a whole number above 0; None for "auto"."""
    if text == "auto":
        return None
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a positive whole number")
    return int(text)
