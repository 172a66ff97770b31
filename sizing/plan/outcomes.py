"""The outcomes of a run in a market: equally likely hours and dollars, with the work's range.

On Spot alone, on demand, or on Spot with the Guard's fallback to on demand at a deadline. All three
have the same range of work, so that their quantiles can be compared.
"""

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Literal

import numpy as np

from sizing.plan.size_plan import Plan
from sizing.spot.interruptions import SpotLife
from sizing.spot.pattern import NOTICE_ARRIVES, Array, unseen_zone
from sizing.spot.replay import Prices, Replay, ReplayJob, ReplayOutcome
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
    hours = (works_of(plan) + plan.first.seconds) / 3600
    return Outcomes(market="on-demand", hours=hours, usd=hours * plan.inputs.price.usd_per_hour)


# Enough for the mean to a few percent; a sample takes about a twentieth of a second.
NUM_SAMPLES = 40
_SEED = 20261122
_STRIDE = 7
# A course begins this many mean lives and waits before the run, which may start at any moment.
_BEFORE = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WithFallback:
    """Expected dollars of the instances with the fallback, and the part that is on demand.

    `in_time_share`: the runs that end by the deadline; the others' work is longer than planned.
    """

    deadline_hours: float
    usd_mean: float
    usd_p90: float
    hours_p90: float
    # Shares of the paid hours, and of the runs.
    on_demand_share: float
    fallback_share: float
    in_time_share: float
    outcomes: Outcomes = field(compare=False, repr=False)


def deadline_sentence(forecast: WithFallback) -> str:
    """Return the forecast as a sentence."""
    return (
        f"${forecast.usd_mean:.2f} on average, ${forecast.usd_p90:.2f} (p90), "
        f"{forecast.on_demand_share:.0%} of the hours on demand; {forecast.fallback_share:.0%} of "
        f"the runs need it, {forecast.in_time_share:.0%} end in time (modelled, with the range of "
        "the work)"
    )


@lru_cache(maxsize=4)  # both the sentence and the JSON of a plan need it
def deadline_fallback(plan: Plan) -> WithFallback | None:
    """Return the forecast of a run with a deadline; None without one."""
    deadline, spot = plan.request.deadline_hours, plan.spot
    if not deadline or spot is None or plan.request.on_demand:
        return None
    inputs = plan.inputs
    prices = Prices(spot=inputs.spot_price.usd_per_hour, on_demand=inputs.price.usd_per_hour)
    # Taken in strides below: a bad pool says nothing about the GPU's speed.
    works = [max(1.0, float(work)) for work in works_of(plan)]
    jobs = [
        ReplayJob(
            work=works[_STRIDE * sample % len(works)],
            deadline=deadline * 3600,
            first=plan.first.seconds,
            restart=plan.restart.seconds,
            save=plan.notice.save,
            interval=max(spot.interval_seconds, 60.0),
            notice_idle=plan.notice.save if plan.notice.fits else None,
        )
        for sample in range(NUM_SAMPLES)
    ]
    done = [_outcome(plan, job, prices, sample) for sample, job in enumerate(jobs)]
    paid = sum(each.spot + each.on_demand for each in done)
    outcomes = Outcomes(
        market="fallback",
        hours=np.array([each.seconds / 3600 for each in done]),
        usd=np.array([each.usd(prices) for each in done]),
    )
    return WithFallback(
        deadline_hours=deadline,
        usd_mean=float(outcomes.usd.mean()),
        usd_p90=outcomes.usd_at(0.9),
        hours_p90=outcomes.hours_at(0.9),
        on_demand_share=sum(each.on_demand for each in done) / paid,
        fallback_share=fmean(each.on_demand > 0 for each in done),
        in_time_share=fmean(each.is_done_by(deadline) for each in done),
        outcomes=outcomes,
    )


def _outcome(plan: Plan, job: ReplayJob, prices: Prices, sample: int) -> ReplayOutcome:
    luck = random.Random(_SEED + sample)
    horizon = max(2 * job.deadline, job.deadline + job.work) + 3600
    lives = _lives(plan, luck, sample, horizon=horizon)
    return Replay(
        lives=lives,
        job=job,
        horizon=horizon,
        has_notice=[luck.random() < NOTICE_ARRIVES for _ in lives],
        fallback=prices,
    ).run()


def _lives(plan: Plan, luck: random.Random, sample: int, *, horizon: float) -> list[SpotLife]:
    """Draw one course of Spot: `sample` decides how bad its pools are, luck the rest."""
    taken = plan.inputs.interruptions
    pattern = taken.pattern
    bad = unseen_zone((sample + 0.5) / NUM_SAMPLES)
    life = 3600 / max(taken.rate_per_hour, 1e-6) / math.exp(pattern.rate_spread * bad)
    wait = taken.wait_seconds * math.exp(pattern.wait_spread * bad)
    now = -_BEFORE * min(life + wait, 1e6) * luck.random()
    lives: list[SpotLife] = []
    while now < horizon:
        end = now + _weibull(luck, life, pattern.life_shape)
        if end > 0:
            lives.append(SpotLife(start=max(now, 0.0), end=end))
        now = end + _weibull(luck, wait, pattern.wait_shape)
    return lives


def _weibull(luck: random.Random, mean: float, shape: float) -> float:
    return max(1.0, luck.weibullvariate(mean / math.gamma(1 + 1 / shape), shape))
