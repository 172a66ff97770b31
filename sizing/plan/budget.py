"""What a size costs when people work on it: dollars a week, month and year at some hours a week."""

from dataclasses import dataclass

WEEKS_A_YEAR = 52
WEEKS_A_MONTH = WEEKS_A_YEAR / 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Dollars of the instance alone: volumes, addresses and storage are extra."""

    week: float
    month: float
    year: float


def budget(usd_per_hour: float, hours_per_week: float) -> Budget:
    """Return the dollars of `hours_per_week`; more hours than a week has are a ValueError."""
    if not 0 < hours_per_week <= 168:
        raise ValueError(f"hours per week are {hours_per_week:g}; give more than 0, at most 168")
    week = usd_per_hour * hours_per_week
    return Budget(week=week, month=week * WEEKS_A_MONTH, year=week * WEEKS_A_YEAR)
