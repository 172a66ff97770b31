"""The options that several commands share, and the prices and the request that they describe."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from contract.run_env import DATA_PLACES
from sizing import catalogue
from sizing.catalogue import PRICE_REGION
from sizing.catalogue.prices import age_note
from sizing.catalogue.refresh import PriceBook, load
from sizing.models.footprints import FOOTPRINTS_FILE
from sizing.plan.plan_inputs import Request, read_manifest
from sizing.plan.size_plan import Plan, make_plan
from sizing.spot.traces import load_trace


def add_price_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --region, --zone and --usd-per-hour."""
    parser.add_argument("--region", default=PRICE_REGION, help="default: %(default)s")
    parser.add_argument(
        "--zone",
        metavar="ID",
        help="the Spot price of this zone, such as use1-az1 (default: the region's dearest)",
    )
    parser.add_argument(
        "--usd-per-hour",
        action="append",
        default=[],
        metavar="[SIZE=]N",
        help="your Spot price of an hour, instead of any known one",
    )


def price_book(arguments: argparse.Namespace) -> PriceBook:
    """Return the prices that the options select, with AWS's saved answers if there are any."""
    return PriceBook(
        region=arguments.region,
        zone=arguments.zone,
        given=_given_usd_per_hour(arguments),
        answers=load(arguments.region),
    )


def _given_usd_per_hour(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the prices of --usd-per-hour by size, or under "" for all; the last one counts."""
    found: dict[str, float] = {}
    for text in arguments.usd_per_hour:
        name, equals, number = text.rpartition("=")
        if equals:
            catalogue.find(name)
        else:
            found.clear()
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < 1e4:
            size = getattr(arguments, "size", None) or "g5.xlarge"
            raise ValueError(
                f"--usd-per-hour {text!r} cannot be read; write dollars, such as 0.45, or "
                f"{size}=0.45 for one size"
            )
    return found


_OPTIONS: tuple[tuple[str, type, Any, str], ...] = (
    ("--micro-batch", int, None, "default: the recipe's"),
    ("--batch", int, None, "samples per step (default: the recipe's)"),
    ("--samples", int, None, "samples in the dataset (default: the recipe's)"),
    ("--epochs", float, None, "epochs of every stage (default: the recipe's)"),
    ("--gpus", int, 1, "GPUs of one run, which share its batch (default: 1; advise: any)"),
    ("--hosts", int, 1, "machines that train one run together, each with --gpus GPUs"),
    ("--runs", int, 1, "equal runs side by side, spread over the size's GPUs (default: 1)"),
    (
        *("--footprints", Path, FOOTPRINTS_FILE),
        "as `sizing model --keep FILE` wrote it (default: the workloads')",
    ),
    (
        *("--unshared-gib", float, 0.0),
        "data that each run holds in memory; 0: memory-mapped and shared (default)",
    ),
    ("--volume-gib", int, None, "default: 200, or the instance store's"),
    ("--dataset-gib", float, None, "default: the workload's data"),
    (
        *("--manifest", Path, None),
        "a dataset's manifest.json: its size, its samples and, of images, their means",
    ),
    ("--interval", str, "auto", "auto, 2epochs, 100steps or 600s (default: auto)"),
    ("--rate", float, None, "interruptions per machine hour"),
    (
        *("--trace", Path, None),
        "a trace as in skypilot-org/spot-traces, replayed instead of --rate",
    ),
    (
        *("--deadline-hours", float, None),
        "end within N hours, on demand where Spot is too slow (default: Spot only)",
    ),
    ("--notice", float, None, "seconds of notice (default: 120)"),
)
# The fields of a request whose names differ from their options'.
_FIELDS = {
    "--interval": "checkpoint_interval",
    "--rate": "rate_per_hour",
    "--notice": "notice_seconds",
}
_METAVARS = {int: "N", float: "N", str: "INTERVAL", Path: "FILE"}


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that a plan depends on besides workload and size."""
    for name, kind, default, text in _OPTIONS:
        parser.add_argument(
            name,
            dest=_FIELDS.get(name),
            type=kind,
            default=default,
            metavar=_METAVARS[kind],
            help=text,
        )
    parser.add_argument(
        "--sharded", action="store_true", help="the GPUs of a run share its model and optimizer"
    )
    parser.add_argument(
        "--data-on",
        metavar="DISK",
        choices=DATA_PLACES,
        default="ebs",
        help="ebs, a gp3 volume, or nvme, the size's instance store (default: %(default)s)",
    )
    add_price_arguments(parser)


def request(arguments: argparse.Namespace, size: str) -> Request:
    """Return the request that the options describe: each is named like its field, or read here."""
    names = {field.name for field in fields(Request)}
    read = {
        "size": size,
        "dataset": read_manifest(arguments.manifest) if arguments.manifest else None,
        "trace": load_trace(arguments.trace) if arguments.trace else None,
        "prices": price_book(arguments),
    }
    given = {n: v for n, v in vars(arguments).items() if n in names and v is not None}
    return Request(**given | read)


def planner(arguments: argparse.Namespace) -> Callable[[Request], Plan]:
    """Return a function that plans a request with the options' footprints."""
    return partial(make_plan, footprints_file=arguments.footprints)


def price_ages(plans: Iterable[Plan]) -> str:
    """Return how old the prices of some plans are."""
    return age_note(
        price for plan in plans for price in (plan.inputs.price, plan.inputs.spot_price)
    )
