"""What an hour of an instance costs where AWS was not asked: list prices and Spot snapshots."""

from dataclasses import dataclass
from typing import Literal

from sizing.catalogue.sizes import find

PRICE_REGION = "us-east-1"
_SPOT_SNAPSHOT = (
    "skypilot-org/skypilot-catalog v8/aws/vms.csv, commit 00148f2: one snapshot of us-east-1, "
    "mid-2026; its most expensive zone"
)
_SPOT_FIELD_REPORT = "a public field report of 2026-08-29: 96-100 % of the list price that day"
# The only Spot prices known, the highest of each: a prediction that errs should err upwards.
_SPOT_SEEN = {
    "g5.2xlarge": (0.593, _SPOT_SNAPSHOT),
    "g5.24xlarge": (3.18, _SPOT_SNAPSHOT),
    "g6.2xlarge": (0.9776, _SPOT_FIELD_REPORT),
}
# 0.593 / 1.212: the smallest discount of a g5 in the snapshot. The field report shows that a
# modelled Spot price is not a promise.
_MODELLED_SPOT_SHARE = 0.49


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Dollars for one hour of one instance, with their basis."""

    usd_per_hour: float
    basis: Literal["list price", "snapshot", "modelled", "refreshed"]
    source: str


def hourly_price(size: str) -> Price:
    """Return the on-demand list price (Linux, us-east-1); a ValueError where none is known."""
    instance = find(size)
    if instance.on_demand_usd_per_hour is None:
        raise ValueError(f"size {size!r} has no {PRICE_REGION} on-demand price in the catalogue")
    return Price(
        usd_per_hour=instance.on_demand_usd_per_hour, basis="list price", source=instance.source
    )


def spot_price(size: str) -> Price:
    """Return the assumed Spot price: a dated snapshot where there is one, else modelled."""
    if size in _SPOT_SEEN:
        usd_per_hour, source = _SPOT_SEEN[size]
        return Price(usd_per_hour=usd_per_hour, basis="snapshot", source=source)
    on_demand = hourly_price(size)
    return Price(
        usd_per_hour=round(on_demand.usd_per_hour * _MODELLED_SPOT_SHARE, 4),
        basis="modelled",
        source=f"{_MODELLED_SPOT_SHARE:.0%} of the on-demand price, as for g5.2xlarge in "
        + _SPOT_SNAPSHOT,
    )
