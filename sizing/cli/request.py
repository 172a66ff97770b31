"""The options that a plan depends on, the same for plan, advise and model, and what they ask."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path

from contract.run_env import DATA_PLACES
from sizing.cli.prices import add_price_arguments, ages, price_book
from sizing.models.footprints import FOOTPRINTS_FILE
from sizing.plan.dataset import read_manifest
from sizing.plan.plan import Plan, make_plan
from sizing.plan.request import Request
from sizing.spot.traces import load_trace


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that a plan depends on beside workload and size."""
    parser.add_argument("--micro-batch", type=int, help="default: the recipe's")
    parser.add_argument("--batch", type=int, help="samples of a step (default: the recipe's)")
    parser.add_argument("--samples", type=int, help="of the dataset (default: the recipe's)")
    parser.add_argument("--epochs", type=float, help="of every stage (default: the recipe's)")
    parser.add_argument(
        "--gpus",
        "--world",
        type=int,
        default=1,
        help="GPUs of one run, which share its batch (default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="equal runs side by side, spread over the size's GPUs (default: %(default)s)",
    )
    parser.add_argument(
        "--footprints",
        type=Path,
        metavar="FILE",
        default=FOOTPRINTS_FILE,
        help="as `sizing model --keep FILE` wrote it (default: the workloads')",
    )
    parser.add_argument(
        "--unshared-gib",
        type=float,
        default=0.0,
        help="data that each run holds itself; 0: memory-mapped and shared (default)",
    )
    parser.add_argument(
        "--data-on",
        metavar="DISK",
        choices=DATA_PLACES,
        default="ebs",
        help="ebs, a gp3 volume, or nvme, the size's instance store (default: %(default)s)",
    )
    parser.add_argument("--volume-gib", type=int, help="default: 200, or the instance store's")
    parser.add_argument("--dataset-gib", type=float, help="default: the workload's data")
    parser.add_argument(
        "--manifest",
        type=Path,
        metavar="FILE",
        help="a dataset's manifest.json: its size, its samples and, of images, their means",
    )
    parser.add_argument(
        "--interval",
        dest="checkpoint_interval",
        metavar="INTERVAL",
        default="auto",
        help="auto, 2epochs, 100steps or 600s (default: %(default)s)",
    )
    parser.add_argument(
        "--rate",
        dest="rate_per_hour",
        metavar="N",
        type=float,
        help="interruptions per machine hour",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace as in skypilot-org/spot-traces, replayed instead of --rate",
    )
    parser.add_argument(
        "--deadline-hours",
        type=float,
        metavar="N",
        help="on demand where Spot is not enough: what that costs (default: Spot only)",
    )
    add_price_arguments(parser)
    parser.add_argument(
        "--notice",
        dest="notice_seconds",
        metavar="N",
        type=float,
        help="seconds of notice (default: 120)",
    )


def request(arguments: argparse.Namespace, size: str) -> Request:
    """Return the request that the options describe: each is called as its field, or read here."""
    names = {field.name for field in fields(Request)}
    read = {
        "size": size,
        "dataset": read_manifest(arguments.manifest) if arguments.manifest else None,
        "trace": load_trace(arguments.trace) if arguments.trace else None,
        "prices": price_book(arguments),
    }
    return Request(**{n: v for n, v in vars(arguments).items() if n in names} | read)


def planner(arguments: argparse.Namespace) -> Callable[[Request], Plan]:
    """Return what plans a request by the options' footprints."""
    return partial(make_plan, footprints_file=arguments.footprints)


def price_ages(plans: Iterable[Plan]) -> str:
    """Return how old the prices of some plans are."""
    return ages(price for plan in plans for price in (plan.inputs.price, plan.inputs.spot_price))
