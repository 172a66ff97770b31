"""Prices by region and zone, as SkyPilot's catalogue had them one day: spot_snapshot.csv.

`python -m sizing catalogue --import-snapshot vms.csv --date DAY` writes that file from a newer
aws/vms.csv of skypilot-org/skypilot-catalog, in the newest version of its catalogs/. Local zones
are left out.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

from contract.suggestion import suggest
from sizing.catalogue.facts import facts
from sizing.catalogue.sizes import InstanceType, find, instances
from sizing.catalogue.sizes import alternates as of_families

SNAPSHOT_FILE = Path(__file__).with_name("spot_snapshot.csv")
_COLUMNS = ("InstanceType", "Price", "SpotPrice", "Region", "AvailabilityZone")
_HEAD = ("size", "region", "on_demand_usd_per_hour", "spot_usd_per_hour_by_zone", "seen")
_ZONE_ID = re.compile(r"[a-z]+\d+-az\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A size's prices in a region: on demand, and on Spot in each zone (by its id, use1-az1)."""

    on_demand_usd_per_hour: float
    spot_usd_per_hour: Mapping[str, float]
    seen: str = ""  # its day and source, where not those of the file


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceSnapshot:
    """All offers of one day, by size and region, with their source."""

    day: date
    source: str
    offers: Mapping[tuple[str, str], Offer]

    def seen(self, offer: Offer) -> tuple[date, str]:
        """Return the day and the source of an offer."""
        day, _, source = (offer.seen or f"{self.day}: {self.source}").partition(": ")
        return date.fromisoformat(day), source

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions that it has prices for."""
        return tuple(sorted({region for _, region in self.offers}))


@cache
def snapshot() -> PriceSnapshot:
    """Return the snapshot that ships with the catalogue."""
    return read(SNAPSHOT_FILE)


def read(path: Path) -> PriceSnapshot:
    """Read a file written by `write`."""
    with path.open(newline="", encoding="utf-8") as lines:
        day, source = next(lines).removeprefix("# ").rstrip("\n").split(": ", 1)
        offers = {
            (row["size"], row["region"]): Offer(
                on_demand_usd_per_hour=float(row["on_demand_usd_per_hour"]),
                spot_usd_per_hour={
                    zone: float(usd)
                    for zone, usd in (
                        pair.split("=") for pair in row["spot_usd_per_hour_by_zone"].split()
                    )
                },
                seen=row["seen"],
            )
            for row in csv.DictReader(lines)
        }
    return PriceSnapshot(day=date.fromisoformat(day), source=source, offers=offers)


def write(found: PriceSnapshot, path: Path) -> None:
    """Write a snapshot: a line on its origin, then one row for each size and region."""
    with path.open("w", newline="", encoding="utf-8") as lines:
        lines.write(f"# {found.day}: {found.source}\n")
        rows = csv.writer(lines, lineterminator="\n")
        rows.writerow(_HEAD)
        for (size, region), offer in sorted(found.offers.items()):
            zones = " ".join(f"{zone}={usd:g}" for zone, usd in offer.spot_usd_per_hour.items())
            listed = f"{offer.on_demand_usd_per_hour:.7g}"
            rows.writerow([size, region, listed, zones, offer.seen])


def import_skypilot(path: Path, *, day: date, source: str) -> PriceSnapshot:
    """Read our sizes from SkyPilot's vms.csv; another file is a ValueError."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        missing = set(_COLUMNS) - set(rows.fieldnames or ())
        if missing:
            raise ValueError(
                f"{path} is not SkyPilot's vms.csv: it has no column {', '.join(sorted(missing))}"
            )
        offers = _offers(rows, path)
    if not offers:
        raise ValueError(f"{path} has no price of any size in the catalogue")
    return PriceSnapshot(day=day, source=source, offers=offers)


def _offers(rows: Iterable[Mapping[str, str]], path: Path) -> dict[tuple[str, str], Offer]:
    found: dict[tuple[str, str], tuple[float, dict[str, float]]] = {}
    known = instances()
    for row in rows:
        size, zone = row["InstanceType"], row["AvailabilityZone"]
        if size not in known or not row["Price"] or not _ZONE_ID.fullmatch(zone):
            continue
        try:
            listed, spot = float(row["Price"]), float(row["SpotPrice"] or 0)
        except ValueError:
            raise ValueError(f"{path}: the price of {size} in {zone} is not a number") from None
        zones = found.setdefault((size, row["Region"]), (listed, {}))[1]
        if spot > 0:
            zones[zone] = spot
    return {
        place: Offer(on_demand_usd_per_hour=listed, spot_usd_per_hour=dict(sorted(zones.items())))
        for place, (listed, zones) in found.items()
    }


PRICE_REGION = "us-east-1"
# Spot prices move within days, list prices within years.
STALE_DAYS = {"refreshed": 7, **dict.fromkeys(("modelled", "assumed", "snapshot"), 30)}
STALE_DAYS["list price"] = facts()["list price"].good_days


class UnknownPriceError(ValueError):
    """The catalogue has no price of this size in this region."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Dollars for one hour of one instance, with their basis and date.

    `assumed`: the catalogue has no price of this family in the region.
    """

    usd_per_hour: float
    basis: Literal["list price", "snapshot", "modelled", "assumed", "refreshed", "given"]
    source: str
    day: date | None = None

    @property
    def days_old(self) -> int:
        """Its age today; a given price has none."""
        return (datetime.now(UTC).date() - self.day).days if self.day else 0


@cache
def hourly_price(size: str, region: str = PRICE_REGION, *, assume: bool = False) -> Price:
    """Return the on-demand price (Linux); a ValueError if none is known.

    us-east-1: the list price, or the snapshot's if that is newer. Elsewhere the snapshot's, or, if
    it has only others of the family, us-east-1's price times those sizes' ratio to us-east-1. With
    `assume`, if none of these is known: times the highest ratio of any region, because a budget
    should err upwards.
    """
    instance = find(size)
    here = instance.on_demand_usd_per_hour
    seen = snapshot()
    listed_on, offer = facts()["list price"].day, seen.offers.get((size, region))
    is_newer = offer is not None and seen.seen(offer)[0] > listed_on
    if region == PRICE_REGION and here is not None and not is_newer:
        return Price(usd_per_hour=here, basis="list price", source=instance.source, day=listed_on)
    if not assume:
        _check_region(region, seen)
    if offer is not None:
        day, source = seen.seen(offer)
        return Price(
            usd_per_hour=offer.on_demand_usd_per_hour,
            basis="list price",
            source=f"{source}, {region}",
            day=day,
        )
    every = [
        (find(other).family, where, offer.on_demand_usd_per_hour / usual.on_demand_usd_per_hour)
        for (other, where), offer in seen.offers.items()
        if (usual := seen.offers.get((other, PRICE_REGION)))
    ]
    factors = [
        each for family, where, each in every if (family, where) == (instance.family, region)
    ]
    if here is None or not (factors or assume):
        raise UnknownPriceError(
            f"size {size!r} has no {region} on-demand price in the catalogue: it may not be sold "
            f"there; ask AWS: python -m sizing catalogue {size} --refresh --region {region}"
        )
    factor = median(factors) if factors else max(each for _, _, each in every)
    why = f"as for others of {instance.family} in {region}"
    if not factors:
        why = f"the most that any region charges: no price of {size} in {region} is known"
    return Price(
        usd_per_hour=round(here * factor, 4),
        basis="modelled" if factors else "assumed",
        source=f"us-east-1's list price x {factor:.3g}, {why}: {seen.source}",
        day=seen.day,
    )


@cache
def spot_price(
    size: str, region: str = PRICE_REGION, zone: str | None = None, *, assume: bool = False
) -> Price:
    """Return the assumed Spot price: the snapshot's if it has one, else modelled."""
    seen = snapshot()
    if not assume:
        _check_region(region, seen)
    _check_zone(zone, region, seen)
    offer = seen.offers.get((size, region))
    if offer and offer.spot_usd_per_hour and (zone is None or zone in offer.spot_usd_per_hour):
        return _seen(offer, zone, region, seen)
    on_demand = hourly_price(size, region, assume=assume)
    share, why = _modelled_share(size, region, seen)
    return Price(
        usd_per_hour=round(on_demand.usd_per_hour * share, 4),
        basis="assumed" if on_demand.basis == "assumed" else "modelled",
        source=f"{share:.0%} of the on-demand price, {why}: {seen.source}",
        day=seen.day,
    )


def _seen(offer: Offer, zone: str | None, region: str, seen: PriceSnapshot) -> Price:
    zones = offer.spot_usd_per_hour
    taken = zone or max(zones, key=lambda name: zones[name])
    which = "" if zone else f", the dearest of {len(zones)} zones"
    day, source = seen.seen(offer)
    return Price(
        usd_per_hour=zones[taken],
        basis="snapshot",
        source=f"{source}, {region}, {taken}{which}",
        day=day,
    )


def _modelled_share(size: str, region: str, seen: PriceSnapshot) -> tuple[float, str]:
    """Return the share of the list price: the family's highest, else the upper quartile."""
    region = region if region in seen.regions else PRICE_REGION
    shares = {
        other: max(offer.spot_usd_per_hour.values()) / offer.on_demand_usd_per_hour
        for (other, where), offer in seen.offers.items()
        if where == region and offer.spot_usd_per_hour
    }
    family = find(size).family
    own = [share for other, share in shares.items() if find(other).family == family]
    if own:
        return max(own), f"the highest share of {family} in {region}"
    third = quantiles(shares.values(), n=4)[2] if len(shares) > 1 else max(shares.values())
    return third, f"the upper quartile of all sizes seen in {region}"


def _check_region(region: str, seen: PriceSnapshot) -> None:
    """Refuse a region without prices in one sentence that says what to do."""
    if region not in seen.regions:
        raise ValueError(
            f"the catalogue has no prices of region {region!r} ({suggest(region, seen.regions)}); "
            f"ask AWS: python -m sizing catalogue --refresh --region {region}"
        )


def _check_zone(zone: str | None, region: str, seen: PriceSnapshot) -> None:
    """Refuse a zone that the region does not have, or that is an account's own name for one."""
    if zone is None:
        return
    known = sorted({z for (_, where), offer in seen.offers.items() if where == region
                    for z in offer.spot_usd_per_hour})  # fmt: skip
    if zone not in known:
        raise ValueError(
            f"zone {zone!r} is not a zone id of {region}; known are {', '.join(known)} "
            "(each account names zones differently; aws ec2 describe-availability-zones has both)"
        )


def age_note(prices: Iterable[Price | None], today: date | None = None) -> str:
    """Return one sentence: how old the prices are today, and what to do if that is too old."""
    today = today or datetime.now(UTC).date()
    oldest: dict[str, date] = {}
    is_old = False
    for price in prices:
        if price is None or price.day is None:
            continue
        oldest[price.basis] = min(price.day, oldest.get(price.basis, price.day))
        is_old |= (today - price.day).days > STALE_DAYS[price.basis]
    if not oldest:
        return "Prices: as given."
    ages = ", ".join(
        f"{basis} {(today - day).days} days old ({day})" for basis, day in sorted(oldest.items())
    )
    warning = " WARNING: old; python -m sizing catalogue --refresh asks AWS." if is_old else ""
    return f"Prices: {ages}.{warning}"


def alternates(
    size: str, *, region: str = PRICE_REGION, **options: Any
) -> tuple[InstanceType, ...]:
    """Return a size's alternates, as sizes.py has them, of families that the region sells.

    The snapshot says which, where it covers the region; it lacks single sizes that are sold.
    """
    sold = _families_in(region)
    return of_families(size, families=sold and sold | {find(size).family}, **options)


@cache
def _families_in(region: str) -> frozenset[str] | None:
    sold = {each.partition(".")[0] for each, place in snapshot().offers if place == region}
    return frozenset(sold) or None
