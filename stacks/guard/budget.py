"""One budget over several runs: what each has spent in a period, in one object of the run bucket.

Each run's Guard writes its own dollars, on the condition that no other wrote in between, with those
of its next tick: until then no call can end its machines. So the sum is not behind what is spent.
Periods are of UTC by the Guard's own clock; no time of another Guard is compared with it.
"""

import json
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from contract.keys import BUDGETS, PERIODS
from stacks.guard.settings import GuardSettings

_FIGURES = ("usd", "billed", "ahead")


@dataclass(kw_only=True, slots=True)
class Budget:
    """One period's runs; what a newer Guard adds to them is kept."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def charge(self, run_id: str, *, billed: float, ahead: float) -> None:
        """Charge what a run was billed in the period, beyond what its Guard has charged before.

        A figure that falls, of a ledger that begins anew, takes nothing back.
        """
        run = self.runs.setdefault(run_id, {"usd": 0.0, "billed": 0.0})
        more = max(0.0, billed - run["billed"])
        run |= {"usd": run["usd"] + more, "billed": billed, "ahead": ahead}

    @property
    def usd(self) -> float:
        """Dollars spent in the period, by runs that are deleted, too."""
        return math.fsum(run["usd"] for run in self.runs.values())

    @property
    def ahead(self) -> float:
        """Dollars that all may spend before a call can end their machines."""
        return math.fsum(run["ahead"] for run in self.runs.values())

    def to_json(self) -> bytes:
        """Return the object's content."""
        return json.dumps({**self.others, "runs": self.runs}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Budget":
        """Read it; ValueError for anything else."""
        try:
            others = json.loads(data)
            found = cls(runs=others.pop("runs"), others=others)
            figures = [run[name] for run in found.runs.values() for name in _FIGURES]
            if all(figure >= 0 for figure in figures):
                return found
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"not a budget: {error}") from error
        raise ValueError(f"not a budget: {figures}")


def period_of(settings: GuardSettings, now: float) -> str:
    """Return the name of the period."""
    return datetime.fromtimestamp(now, UTC).isoformat()[: PERIODS[settings.budget_period]]


def budget_name(settings: GuardSettings, now: float) -> str:
    """Return the key of the period's object in the run bucket."""
    return f"{BUDGETS}{settings.budget_name}/{period_of(settings, now)}.json"
