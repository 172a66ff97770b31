"""The options that select prices, the same for every command."""

import argparse

from sizing import catalogue
from sizing.catalogue import PRICE_REGION
from sizing.catalogue.refresh import PriceBook, load


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
