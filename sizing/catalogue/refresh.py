"""Today's list prices, Spot prices, placement scores and quotas from AWS, in a dated cache file.

Needs credentials and a network, so only `python -m sizing catalogue --refresh` calls AWS. Each
question is asked separately: what the account may not ask is reported, the other answers are kept.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sizing.catalogue.prices import PRICE_REGION, Price, hourly_price, spot_price
from sizing.catalogue.sizes import find

CACHE_FOLDER = Path.home() / ".cache" / "training-stack"
STALE_DAYS = 7.0
# With fewer than three sizes GetSpotPlacementScores returns low scores only.
LEAST_FOR_SCORES = 3


@dataclass(kw_only=True, slots=True)
class Refreshed:
    """What AWS answered: each figure with the time of the answer, {"value", "at"}."""

    region: str = PRICE_REGION
    on_demand: dict[str, dict[str, Any]] = field(default_factory=dict)
    spot: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    quotas: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def cache_file(region: str = PRICE_REGION) -> Path:
    """Return the default cache file of a region."""
    return CACHE_FOLDER / f"{region}.json"


def load(path: Path) -> Refreshed | None:
    """Read a cache file; None if it is missing, a ValueError if it is not one."""
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


def save(refreshed: Refreshed, path: Path) -> None:
    """Write the cache file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(refreshed), indent=1), encoding="utf-8")
    part.replace(path)


def prices(size: str, refreshed: Refreshed | None) -> tuple[Price | None, Price | None]:
    """Return on-demand and Spot price of a size: AWS's answer if known, else the catalogue's.

    Spot differs by zone: the highest counts, because a prediction that errs should err upwards.
    """
    instance = find(size)
    listed = instance.on_demand_usd_per_hour is not None
    on_demand = hourly_price(size) if listed else None
    spot = spot_price(size) if listed else None
    if refreshed and size in refreshed.on_demand:
        answer = refreshed.on_demand[size]
        on_demand = _price(answer["value"], "pricing:GetProducts", refreshed.region, answer["at"])
    if refreshed and size in refreshed.spot:
        answer = refreshed.spot[size]
        highest = max(answer["value"].values())
        spot = _price(highest, "ec2:DescribeSpotPriceHistory", refreshed.region, answer["at"])
    return on_demand, spot


def _price(usd: float, call: str, region: str, at: str) -> Price:
    return Price(
        usd_per_hour=usd, basis="refreshed", source=f"AWS {call}, {region}, asked {at[:16]} UTC"
    )


def age_days(figure: dict[str, Any], now: datetime) -> float:
    """Return the days since AWS answered."""
    return (now - datetime.fromisoformat(figure["at"])).total_seconds() / 86_400


def describe_age(refreshed: Refreshed | None, sizes: Sequence[str], now: datetime) -> str:
    """Return one sentence on how old the prices of these sizes are."""
    if refreshed is None:
        return "Prices are the catalogue's (its sources have the dates); --refresh asks AWS."
    answers = [figures[size] for figures in (refreshed.on_demand, refreshed.spot)
               for size in sizes if size in figures]  # fmt: skip
    if not answers:
        return "AWS was asked about none of these sizes; prices are the catalogue's."
    oldest = max(age_days(answer, now) for answer in answers)
    known = sum(size in refreshed.on_demand or size in refreshed.spot for size in sizes)
    stale = f"; older than {STALE_DAYS:g} days: --refresh" if oldest > STALE_DAYS else ""
    return (
        f"Prices of {known} of {len(sizes)} sizes are AWS's ({refreshed.region}), the oldest "
        f"{oldest:.1f} days old{stale}; the others are the catalogue's."
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

    # Few regions serve the price list; this one has the prices of all.
    pricing = session.client("pricing", region_name=PRICE_REGION)
    ec2 = session.client("ec2", region_name=region)
    limits = session.client("service-quotas", region_name=region)
    codes = sorted({code for size in sizes if (code := find(size).spot_quota_code)})
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
    """Yield the newest Spot price of each zone, by size."""
    newest: dict[str, dict[str, tuple[datetime, float]]] = {}
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=list(sizes), ProductDescriptions=["Linux/UNIX"], StartTime=now
    )
    for page in pages:
        for entry in page["SpotPriceHistory"]:
            zones = newest.setdefault(entry["InstanceType"], {})
            seen = (entry["Timestamp"], float(entry["SpotPrice"]))
            zones[entry["AvailabilityZone"]] = max(seen, zones.get(entry["AvailabilityZone"], seen))
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
        answer = limits.get_service_quota(ServiceCode="ec2", QuotaCode=code.rstrip("?"))
        yield code, float(answer["Quota"]["Value"])
