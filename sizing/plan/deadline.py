"""The cost of a run with a deadline: the Guard's decisions on modelled interruptions.

The worlds are those of sizing/spot/pattern.py: bursty lives and waits, pools of unknown quality.
"""

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean

import numpy as np

from sizing.plan.outcomes import Outcomes, works_of
from sizing.plan.plan import Plan
from sizing.spot.pattern import NOTICE_ARRIVES, SEEN, SEEN_IN_FLEETS, unseen_zone
from sizing.spot.replay import Prices, Replay, ReplayJob, ReplayOutcome
from sizing.spot.traces import SpotLife

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
    pattern = SEEN_IN_FLEETS if plan.request.pools > 1 else SEEN
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
