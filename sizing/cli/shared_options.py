"""The options that several commands share, and the prices and the request that they describe."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
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
from sizing.spot.interruptions import HISTORY_FILE, read_history

# How argparse reads an option.
FLAG: Mapping[str, Any] = {"action": "store_true"}
COUNT: Mapping[str, Any] = {"type": int, "metavar": "N"}
ONE: Mapping[str, Any] = {**COUNT, "default": 1}
NUMBER: Mapping[str, Any] = {"type": float, "metavar": "N"}
FILE: Mapping[str, Any] = {"type": Path, "metavar": "FILE"}
# By name: how argparse reads it, and its help.
Options = Mapping[str, tuple[Mapping[str, Any], str]]
_PRICES: Options = {
    "--region": ({"default": PRICE_REGION}, "default: %(default)s"),
    "--zone": (
        {"metavar": "ID"},
        "the Spot price of this zone, such as use1-az1 (default: the region's dearest)",
    ),
    "--usd-per-hour": (
        {"action": "append", "default": [], "metavar": "[SIZE=]N"},
        "your Spot price of an hour, instead of any known one",
    ),
}


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    """Add options in their order."""
    for name, (kind, text) in options.items():
        parser.add_argument(name, help=text, **kind)


def add_price_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --region, --zone and --usd-per-hour."""
    add_options(parser, _PRICES)


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


_OPTIONS: Options = {
    "--micro-batch": (COUNT, "default: the recipe's"),
    "--batch": (COUNT, "samples per step (default: the recipe's)"),
    "--samples": (COUNT, "samples in the dataset (default: the recipe's)"),
    "--epochs": (NUMBER, "epochs of every stage (default: the recipe's)"),
    "--gpus": (ONE, "GPUs of one run, which share its batch (default: 1; advise: any)"),
    "--hosts": (ONE, "machines that train one run together, each with --gpus GPUs"),
    "--runs": (ONE, "equal runs side by side, spread over the size's GPUs (default: 1)"),
    "--footprints": (
        {**FILE, "default": FOOTPRINTS_FILE},
        "as `sizing model --keep FILE` wrote it (default: the workloads')",
    ),
    "--unshared-gib": (
        {**NUMBER, "default": 0.0},
        "data that each run holds in memory; 0: memory-mapped and shared (default)",
    ),
    "--volume-gib": (COUNT, "default: 200, or the instance store's"),
    "--dataset-gib": (NUMBER, "default: the workload's data"),
    "--manifest": (
        FILE,
        "a dataset's manifest.json: its size, its samples and, of images, their means",
    ),
    "--interval": (
        {"dest": "checkpoint_interval", "default": "auto", "metavar": "INTERVAL"},
        "auto, 2epochs, 100steps or 600s (default: auto)",
    ),
    "--rate": ({**NUMBER, "dest": "rate_per_hour"}, "interruptions per machine hour"),
    "--history": (
        {**FILE, "default": HISTORY_FILE},
        "what Spot did to your runs, the bucket's spot.json (default: sizing/spot_history.json)",
    ),
    "--deadline-hours": (
        NUMBER,
        "end within N hours, on demand where Spot is too slow (default: Spot only)",
    ),
    "--notice": ({**NUMBER, "dest": "notice_seconds"}, "seconds of notice (default: 120)"),
    "--sharded": (FLAG, "the GPUs of a run share its model and optimizer"),
    "--data-on": (
        {"metavar": "DISK", "choices": DATA_PLACES, "default": "ebs"},
        "ebs, a gp3 volume, or nvme, the size's instance store (default: %(default)s)",
    ),
}


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that a plan depends on besides workload and size."""
    add_options(parser, _OPTIONS)
    add_price_arguments(parser)


def request(arguments: argparse.Namespace, size: str) -> Request:
    """Return the request that the options describe: each is named like its field, or read here."""
    names = {field.name for field in fields(Request)}
    if arguments.history != HISTORY_FILE or HISTORY_FILE.exists():
        try:
            read_history(arguments.history)
        except ValueError as error:  # the plan is as without one
            print(f"planned without a Spot history: {error}", file=sys.stderr)
    read = {
        "size": size,
        "dataset": read_manifest(arguments.manifest) if arguments.manifest else None,
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
