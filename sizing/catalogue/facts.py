"""Facts about the outside that go stale: each with its day, its source and its way to be renewed.

Reads facts.csv next to it; `python -m sizing catalogue --facts` shows it with ages.
"""

from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from sizing.csv_rows import read_rows

FACTS_FILE = Path(__file__).with_name("facts.csv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One fact; after `good_days` it is old. `value` is it, where no other file has it."""

    name: str
    day: date
    source: str
    good_days: int
    renew: str
    value: frozenset[str]


@cache
def facts() -> dict[str, Fact]:
    """Return all facts by name."""
    rows = read_rows(FACTS_FILE, Fact, day=lambda row: date.fromisoformat(row["day"]))
    return {each.name: each for each in rows}
