"""The options that say which prices count, the same for every command, and how old those are."""

import argparse
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from sizing import catalogue
from sizing.catalogue import PRICE_REGION, Price, age_note
from sizing.catalogue.refresh import Refreshed, cache_file, load_answers, prices


def add_price_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --region, --zone, --usd-per-hour and --cache."""
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
        help="what an hour on Spot costs you, instead of any known price",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FILE",
        help="as catalogue --refresh saved it (default: ~/.cache/training-stack/REGION.json)",
    )


def answers_of_aws(arguments: argparse.Namespace) -> Refreshed | None:
    """Return AWS's saved answers: of the given file, else of the region's own where it exists."""
    path = price_cache(arguments)
    return load_answers(path, arguments.region) if path else None


def price_cache(arguments: argparse.Namespace) -> Path | None:
    """Return the file of AWS's answers: the given one, else the region's own where it exists."""
    kept = cache_file(arguments.region)
    given: Path | None = arguments.cache
    return given or (kept if kept.exists() else None)


def given_usd_per_hour(arguments: argparse.Namespace, size: str) -> float | None:
    """Return what --usd-per-hour says of a size; what cannot be read is a ValueError."""
    found: float | None = None
    for text in arguments.usd_per_hour:
        name, equals, number = text.rpartition("=")
        if equals:
            catalogue.find(name)
        try:
            usd = float(number)
        except ValueError:
            usd = 0.0
        if not 0 < usd < 1e4:
            raise ValueError(
                f"--usd-per-hour {text!r} cannot be read; write dollars, such as 0.45, or "
                f"{size}=0.45 for one size"
            )
        if not equals or name == size:
            found = usd
    return found


def prices_of(
    arguments: argparse.Namespace, size: str, answers: Refreshed | None
) -> tuple[Price | None, Price | None]:
    """Return on-demand and Spot price of a size, as the options say."""
    return prices(
        size,
        answers,
        region=arguments.region,
        zone=arguments.zone,
        usd_per_hour=given_usd_per_hour(arguments, size),
    )


def ages(found: Iterable[Price | None]) -> str:
    """Return how old these prices are today, with a warning where that is too old."""
    return age_note(found, datetime.now(UTC).date())
