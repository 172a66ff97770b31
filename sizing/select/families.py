"""What each family of sizes is for, and how much an hour of it costs, in words and dollars."""

from dataclasses import dataclass

from sizing import catalogue
from sizing.catalogue import Family

# The cheapest size of a family costs less than this an hour.
_LEVELS = ((0.05, "Low"), (0.5, "Moderate"), (2.0, "High"))
_HIGHEST = "Very High"


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyUse:
    """A family with its use, and the dollars of its cheapest and dearest size (us-east-1)."""

    family: Family
    compute: str
    usd_from: float | None
    usd_to: float | None
    level: str


def family_uses() -> list[FamilyUse]:
    """Return all families, cheapest first; those without a price come last."""
    found = [_use(family) for family in catalogue.families().values()]
    return sorted(found, key=lambda each: (each.usd_from is None, each.usd_from or 0.0))


def cost_level(family: str) -> str:
    """Return the level of a family's cheapest size: Low, Moderate, High or Very High."""
    known = catalogue.families()
    if family not in known:
        raise ValueError(f"family {family!r} is not in the catalogue; known are {', '.join(known)}")
    return _use(known[family]).level


def _use(family: Family) -> FamilyUse:
    of_family = [i for i in catalogue.instances().values() if i.family == family.name]
    prices = [i.on_demand_usd_per_hour for i in of_family if i.on_demand_usd_per_hour]
    least = min(prices, default=None)
    level = "unknown"
    if least is not None:
        level = next((word for limit, word in _LEVELS if least < limit), _HIGHEST)
    cpu = family.kind in ("cpu", "burstable")
    return FamilyUse(
        family=family,
        compute="CPU" if cpu else next((i.gpu for i in of_family if i.gpu), "-"),
        usd_from=least,
        usd_to=max(prices, default=None),
        level=level,
    )
