"""The outcomes of a run in a market: equally likely hours and dollars, with the work's range.

On Spot alone, on demand, or on Spot with the Guard's fallback to on demand at a deadline. All three
have the same range of work, so that their quantiles can be compared.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sizing.plan.plan import Plan
from sizing.spot.pattern import Array
from sizing.spot.simulation import work_steps

Market = Literal["spot", "fallback", "on-demand"]
MARKETS: tuple[Market, ...] = ("spot", "fallback", "on-demand")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """Hours by the clock and dollars of the instances, sample by sample."""

    market: Market
    hours: Array
    usd: Array

    def hours_at(self, share: float) -> float:
        """Return the hours that `share` of the runs do not exceed."""
        return float(np.quantile(self.hours, share, method="hazen"))

    def usd_at(self, share: float) -> float:
        """Return the dollars that `share` of the runs do not exceed."""
        return float(np.quantile(self.usd, share, method="hazen"))

    def chance(self, *, hours: float | None, usd: float | None) -> float:
        """Return the share of the runs that keep both limits; None means no limit."""
        in_time = self.hours <= (np.inf if hours is None else hours)
        return float((in_time & (self.usd <= (np.inf if usd is None else usd))).mean())

    def least(
        self, name: Literal["hours", "usd"], *, share: float, below: float | None
    ) -> float | None:
        """Return the limit of `name` that `share` of runs keep, with `below` as the other limit."""
        found, other = (self.hours, self.usd) if name == "hours" else (self.usd, self.hours)
        kept = np.sort(found if below is None else found[other <= below])
        wanted = int(np.ceil(round(share * len(found), 6)))
        return float(kept[wanted - 1]) if len(kept) >= wanted else None


def works_of(plan: Plan) -> Array:
    """Return the seconds of a plan's work in equal steps of probability."""
    work = plan.work
    return work_steps(work.seconds_low, work.seconds, work.seconds_high)


def on_spot(plan: Plan) -> Outcomes | None:
    """Return the outcomes on Spot alone; None if the run would never end."""
    if plan.spot is None:
        return None
    usd = plan.spot.machine_hours * plan.inputs.spot_price.usd_per_hour
    return Outcomes(market="spot", hours=plan.spot.hours, usd=usd)


def on_demand(plan: Plan) -> Outcomes:
    """Return the outcomes of a run without interruptions."""
    hours = (works_of(plan) + plan.restart.seconds) / 3600
    return Outcomes(market="on-demand", hours=hours, usd=hours * plan.inputs.price.usd_per_hour)
