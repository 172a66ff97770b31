"""The purpose of each family of sizes and its hourly cost, in words and dollars."""

from typing import Any

from sizing import catalogue
from sizing.catalogue.sizes import Family, families

# The cheapest size of a family costs less than this an hour.
_LEVELS = ((0.05, "Low"), (0.5, "Moderate"), (2.0, "High"))
_HIGHEST = "Very High"


def family_rows() -> list[dict[str, Any]]:
    """Return all families, cheapest first; those without a price come last.

    Dollars are those of the cheapest and the most expensive size, in us-east-1.
    """
    found = [_row(family) for family in families().values()]
    return sorted(
        found, key=lambda row: (row["usd_per_hour_from"] is None, row["usd_per_hour_from"] or 0.0)
    )


def _row(family: Family) -> dict[str, Any]:
    of_family = [i for i in catalogue.instances().values() if i.family == family.name]
    prices = [i.on_demand_usd_per_hour for i in of_family if i.on_demand_usd_per_hour]
    least = min(prices, default=None)
    level = "unknown"
    if least is not None:
        level = next((word for limit, word in _LEVELS if least < limit), _HIGHEST)
    cpu = family.kind in ("cpu", "burstable")
    return {
        "family": family.name,
        "compute": "CPU" if cpu else next((i.gpu for i in of_family if i.gpu), "-"),
        "fit": sorted(family.fit),
        "cost_level": level,
        "usd_per_hour_from": least,
        "usd_per_hour_to": max(prices, default=None),
        "use": family.what,
    }
