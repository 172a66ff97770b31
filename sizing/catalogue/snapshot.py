"""Prices by region and zone, as SkyPilot's catalogue had them one day: spot_snapshot.csv.

`python -m sizing catalogue --import-snapshot vms.csv --date DAY` writes that file from a newer
catalogs/v8/aws/vms.csv of skypilot-org/skypilot-catalog. Local zones are left out.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from sizing.catalogue.sizes import instances

SNAPSHOT_FILE = Path(__file__).with_name("spot_snapshot.csv")
_COLUMNS = ("InstanceType", "Price", "SpotPrice", "Region", "AvailabilityZone")
_HEAD = ("size", "region", "on_demand_usd_per_hour", "spot_usd_per_hour_by_zone")
_ZONE_ID = re.compile(r"[a-z]+\d+-az\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A size's prices in a region: on demand, and on Spot in each zone (by its id, use1-az1)."""

    on_demand_usd_per_hour: float
    spot_usd_per_hour: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceSnapshot:
    """All offers of one day, by size and region, with their source."""

    day: date
    source: str
    offers: Mapping[tuple[str, str], Offer]

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
            rows.writerow([size, region, f"{offer.on_demand_usd_per_hour:.7g}", zones])


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
