"""Today's list prices, Spot prices, placement scores and quotas from AWS, in a dated cache file.

Needs credentials and a network, so only `python -m sizing catalogue --refresh` calls AWS. Each
call is made separately: those that the account may not make are reported, other answers are kept.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contract.aws_errors import settings_checked
from sizing.catalogue.prices import PRICE_REGION, Price, UnknownPriceError, hourly_price, spot_price
from sizing.catalogue.sizes import InstanceType, find, trainable_by_price

CACHE_FOLDER = Path.home() / ".cache" / "training-stack"
# With fewer than three sizes GetSpotPlacementScores returns low scores only.
LEAST_FOR_SCORES = 3


@dataclass(kw_only=True, slots=True)
class Refreshed:
    """AWS's answers: each figure with the time of the answer, {"value", "at"}."""

    region: str = PRICE_REGION
    on_demand: dict[str, dict[str, Any]] = field(default_factory=dict)
    spot: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    quotas: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def cache_file(region: str = PRICE_REGION) -> Path:
    """Return the cache file of a region."""
    return CACHE_FOLDER / f"{region}.json"


def load(region: str = PRICE_REGION) -> Refreshed | None:
    """Read a region's cache file; None if it is missing, a ValueError if it is not a cache."""
    path = cache_file(region)
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        refreshed = Refreshed(**document)
        for figures in (refreshed.on_demand, refreshed.spot, refreshed.scores, refreshed.quotas):
            for figure in figures.values():
                datetime.fromisoformat(figure["at"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{path} is not a cache of this command: delete it, then --refresh"
        ) from None
    return refreshed


def save(refreshed: Refreshed) -> None:
    """Write the cache file of its region atomically."""
    path = cache_file(refreshed.region)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(refreshed), indent=1), encoding="utf-8")
    part.replace(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceBook:
    """The prices that count: given ones, else AWS's answers, else the catalogue's.

    `given` has Spot dollars by size, or for every size under "". Without a zone the most expensive
    counts. `assumes`: prices that the catalogue lacks in the region are assumed and marked so.
    """

    region: str = PRICE_REGION
    zone: str | None = None
    assumes: bool = False
    given: Mapping[str, float] = field(default_factory=dict, hash=False)
    answers: Refreshed | None = field(default=None, hash=False)

    def find(self, size: str) -> tuple[Price | None, Price | None]:
        """Return the on-demand and the Spot price of a size; None for one that is not known."""
        return _known(self._on_demand, size), _known(self._spot, size)

    def require(self, size: str) -> tuple[Price, Price]:
        """Return both prices; a size without a known one is a ValueError that says so."""
        return self._on_demand(size), self._spot(size)

    def trainable(self) -> list[tuple[InstanceType, float]]:
        """Return the sizes for the default image that have a price here, cheapest first."""
        usual = (each for each in trainable_by_price() if not each.needs_own_image)
        priced = [(each, self.find(each.size)[0]) for each in usual]
        found = [(each, price.usd_per_hour) for each, price in priced if price]
        return sorted(found, key=lambda pair: pair[1])

    def _on_demand(self, size: str) -> Price:
        if self.answers is None or size not in self.answers.on_demand:
            return hourly_price(size, self.region, assume=self.assumes)
        answer = self.answers.on_demand[size]
        return _price(answer["value"], "pricing:GetProducts", self.answers.region, answer["at"])

    def _spot(self, size: str) -> Price:
        usd, zone = self.given.get(size, self.given.get("")), self.zone
        if usd is not None:
            return Price(usd_per_hour=usd, basis="given", source="given with --usd-per-hour")
        if self.answers is None or size not in self.answers.spot:
            return spot_price(size, self.region, zone, assume=self.assumes)
        answer = self.answers.spot[size]
        zones = answer["value"]
        if zone is not None and zone not in zones:
            raise ValueError(
                f"AWS's answers have no zone {zone!r} for {size}; they have "
                f"{', '.join(sorted(zones))}"
            )
        usd = zones[zone] if zone else max(zones.values())
        return _price(usd, "ec2:DescribeSpotPriceHistory", self.answers.region, answer["at"])


def _known(find_price: Callable[[str], Price], size: str) -> Price | None:
    try:
        return find_price(size)
    except UnknownPriceError:
        return None


def _price(usd: float, call: str, region: str, at: str) -> Price:
    return Price(
        usd_per_hour=usd,
        basis="refreshed",
        source=f"AWS {call}, {region}, asked {at[:16]} UTC",
        day=datetime.fromisoformat(at).date(),
    )


def refresh(
    sizes: Sequence[str], *, session: Any, region: str, earlier: Refreshed | None, now: datetime
) -> Refreshed:
    """Ask AWS about `sizes`, and keep its `earlier` answers about others.

    A ValueError if AWS answers nothing; nothing is changed then.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    kept = earlier if earlier and earlier.region == region else Refreshed(region=region)
    kept.problems = []
    at = now.astimezone(UTC).isoformat()

    def ask(what: str, question: Callable[[], None]) -> None:
        try:
            question()
        except (BotoCoreError, ClientError) as error:
            kept.problems.append(f"{what}: {error}")

    def note(figures: dict[str, dict[str, Any]], answers: Iterable[tuple[str, Any]]) -> None:
        for name, value in answers:
            figures[name] = {"value": value, "at": at}

    with settings_checked():
        # Few regions serve the price list; this one has the prices of all.
        pricing = session.client("pricing", region_name=PRICE_REGION)
        ec2 = session.client("ec2", region_name=region)
        limits = session.client("service-quotas", region_name=region)
    codes = sorted({code for size in sizes if (code := find(size).quota_code)})
    ask("list prices", lambda: note(kept.on_demand, list_prices(pricing, sizes, region)))
    ask("Spot prices", lambda: note(kept.spot, spot_prices(ec2, sizes, now)))
    if len(sizes) >= LEAST_FOR_SCORES:
        ask("placement scores", lambda: note(kept.scores, placement_scores(ec2, sizes, region)))
    ask("quotas", lambda: note(kept.quotas, quotas(limits, codes)))
    if not any(figure["at"] == at for part in (kept.on_demand, kept.spot, kept.scores, kept.quotas)
               for figure in part.values()):  # fmt: skip
        raise ValueError("AWS answered nothing: " + "; ".join(kept.problems))
    return kept


def list_prices(pricing: Any, sizes: Sequence[str], region: str) -> Iterable[tuple[str, float]]:
    """Yield the Linux on-demand list price of each size."""
    for size in sizes:
        wanted = {
            "instanceType": size, "regionCode": region, "operatingSystem": "Linux",
            "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
        }  # fmt: skip
        answer = pricing.get_products(
            ServiceCode="AmazonEC2",
            Filters=[
                {"Type": "TERM_MATCH", "Field": name, "Value": value}
                for name, value in wanted.items()
            ],
        )
        found = [
            float(dimension["pricePerUnit"]["USD"])
            for product in answer["PriceList"]
            for term in json.loads(product)["terms"].get("OnDemand", {}).values()
            for dimension in term["priceDimensions"].values()
            if dimension["unit"] == "Hrs"
        ]
        if positive := [usd for usd in found if usd > 0]:
            yield size, max(positive)


def spot_prices(
    ec2: Any, sizes: Sequence[str], now: datetime
) -> Iterable[tuple[str, dict[str, float]]]:
    """Yield the newest Spot price of each zone, by size and by the zone's id."""
    newest: dict[str, dict[str, tuple[datetime, float]]] = {}
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=list(sizes), ProductDescriptions=["Linux/UNIX"], StartTime=now
    )
    for page in pages:
        for entry in page["SpotPriceHistory"]:
            zones = newest.setdefault(entry["InstanceType"], {})
            # The id, as --zone and the catalogue have it: names differ between accounts.
            zone = entry.get("AvailabilityZoneId") or entry["AvailabilityZone"]
            seen = (entry["Timestamp"], float(entry["SpotPrice"]))
            zones[zone] = max(seen, zones.get(zone, seen))
    for size, zones in newest.items():
        yield size, {zone: usd for zone, (_, usd) in sorted(zones.items())}


def placement_scores(
    ec2: Any, sizes: Sequence[str], region: str
) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield by zone id how likely one of the sizes is to start on Spot, 1 to 10: not a promise."""
    answer = ec2.get_spot_placement_scores(
        InstanceTypes=list(sizes), TargetCapacity=1, RegionNames=[region],
        SingleAvailabilityZone=True,
    )  # fmt: skip
    for entry in answer["SpotPlacementScores"]:
        yield entry["AvailabilityZoneId"], {"score": entry["Score"], "sizes": list(sizes)}


def quotas(limits: Any, codes: Sequence[str]) -> Iterable[tuple[str, float]]:
    """Yield the Spot vCPUs that the account may run, by quota code."""
    for code in codes:
        answer = limits.get_service_quota(ServiceCode="ec2", QuotaCode=code)
        yield code, float(answer["Quota"]["Value"])
