"""Hours and dollars of a run on Spot, as a distribution: a small simulation with a fixed seed.

Machines live as in public traces: many short, a few long, in pools that differ. Modelled:
`python -m benchmarks forecast` holds it against traces, `sizing review` against what happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from sizing.spot.interval import NEVER, NOTICE_ARRIVES, recommend_interval

NOTICE_SECONDS = 120.0
# Samples: how bad the pools are, in equal steps of probability, times luck in each.
NUM_LEVELS, NUM_LUCKS = 10, 25
# Machines simulated one after the other: as few as do; what needs more is extended from them.
MACHINES = (8, 24, 72)
MOST_MACHINES = 200_000

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a run on Spot takes: `hours` by the clock, `machine_hours` paid for. All modelled.

    `goodput` is useful seconds per second paid for, `interruptions` their mean number.
    """

    hours_p50: float
    hours_p90: float
    machine_hours_p50: float
    machine_hours_p90: float
    interruptions: float
    goodput: float
    interval_seconds: float
    interval_why: str
    usd_p50: float | None = None
    usd_p90: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """How interruptions come, beside their rate.

    life_shape, wait_shape   Weibull shapes: 1 is Poisson, less is many short ones and a few long
    rate_spread, wait_spread   standard deviation of the logarithm between pools: nobody knows how
        good the pool is that a run gets
    starts_anywhen   the run starts at any moment, when there may be no machine
    """

    life_shape: float
    wait_shape: float
    rate_spread: float
    wait_spread: float
    starts_anywhen: bool


POISSON = Pattern(
    life_shape=1.0, wait_shape=1.0, rate_spread=0.0, wait_spread=0.0, starts_anywhen=False
)
# The five traces of sizing/spot/interruptions.py: shapes of lives 0.46 to 0.69, of waits 0.45 to
# 0.78; standard deviation of the logarithms between zones 0.9 (rate) and 0.7 (wait).
SEEN = Pattern(
    life_shape=0.55, wait_shape=0.6, rate_spread=0.9, wait_spread=0.7, starts_anywhen=True
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run and what interrupts it; all times in seconds."""

    work: float
    rate: float
    start: float
    restart: float
    checkpoint: float
    interval: float
    notice: float
    notice_saves: float
    wait: float
    pattern: Pattern


def estimate(
    *,
    work_seconds: float,
    rate_per_hour: float,
    restart_seconds: float,
    checkpoint_seconds: float = 0.0,
    interval_seconds: float | None = None,
    notice_fits: bool = True,
    notice_seconds: float = NOTICE_SECONDS,
    notice_arrives: float = NOTICE_ARRIVES,
    start_seconds: float | None = None,
    wait_seconds: float = 0.0,
    epoch_seconds: float | None = None,
    usd_per_hour: float | None = None,
    pattern: Pattern = SEEN,
) -> Estimate:
    """Return hours and dollars, p50 and p90, of `work_seconds` of training on Spot.

    restart_seconds   boot, sync and resume of a replacement; start_seconds the first time
    checkpoint_seconds   what one periodic save keeps the GPU waiting, every interval_seconds of
        training (recommended where not given: see recommend_interval)
    notice_fits, notice_seconds, notice_arrives   the share of interruptions with a notice is saved;
        the trainer stops at the notice, so those seconds are paid for and lost
    wait_seconds   mean wait for the replacement: hours, but no machine hours
    pattern   how bursty, and how unsure: as in public traces, or POISSON

    EC2 does not bill a machine that it takes back within its first hour. That is not counted: a
    prediction that errs should err upwards. A run that cannot end is a ValueError.
    """
    if interval_seconds is None:
        chosen = recommend_interval(
            checkpoint_seconds=checkpoint_seconds,
            rate_per_hour=rate_per_hour,
            notice_fits=notice_fits,
            notice_arrives=notice_arrives,
            epoch_seconds=epoch_seconds,
        )
        interval_seconds, why = chosen.seconds, chosen.why
    else:
        why = "given"
    run = Run(
        work=_checked("work_seconds", work_seconds, zero=False),
        restart=_checked("restart_seconds", restart_seconds),
        rate=_checked("rate_per_hour", rate_per_hour) / 3600,
        start=_checked(
            "start_seconds", restart_seconds if start_seconds is None else start_seconds
        ),
        checkpoint=_checked("checkpoint_seconds", checkpoint_seconds),
        # What comes after the end of the work needs no save.
        interval=min(
            _checked("interval_seconds", interval_seconds, zero=False, infinite=True), work_seconds
        ),
        notice=_checked("notice_seconds", notice_seconds),
        notice_saves=notice_arrives if notice_fits else 0.0,
        wait=_checked("wait_seconds", wait_seconds),
        pattern=pattern,
    )
    machine, clock, losses = _simulate(run)
    usd = usd_per_hour
    machine_p50, machine_p90 = (float(v) / 3600 for v in np.quantile(machine, (0.5, 0.9)))
    hours_p50, hours_p90 = (float(v) / 3600 for v in np.quantile(clock, (0.5, 0.9)))
    return Estimate(
        hours_p50=hours_p50,
        hours_p90=hours_p90,
        machine_hours_p50=machine_p50,
        machine_hours_p90=machine_p90,
        interruptions=losses,
        goodput=run.work / float(machine.mean()),
        interval_seconds=run.interval,
        interval_why=why,
        usd_p50=None if usd is None else machine_p50 * usd,
        usd_p90=None if usd is None else machine_p90 * usd,
    )


def _checked(name: str, value: float, *, zero: bool = True, infinite: bool = False) -> float:
    """Return `value`, or say in one sentence what is wrong with it."""
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be {'at least' if zero else 'more than'} 0, got {value}")
    if math.isinf(value) and not infinite:
        raise ValueError(f"{name} must be a finite number, got {value}")
    return value


@dataclass(frozen=True, slots=True)
class Draws:
    """Random numbers of one pattern, mean 1; axes: level of the pools, luck, machine."""

    lives: Array
    waits: Array
    luck: Array
    # What is left of a life or a wait that is met at any moment.
    rest_of_life: Array
    rest_of_wait: Array
    start: Array
    rate_factor: Array
    wait_factor: Array


@cache
def _draws(pattern: Pattern) -> Draws:
    """Draw once for each pattern, with a fixed seed."""
    generator = np.random.default_rng(20261121)
    shape = (NUM_LEVELS, NUM_LUCKS, MACHINES[-1])

    def weibull(k: float) -> Array:
        return np.asarray(generator.weibull(k, size=shape) / math.gamma(1 + 1 / k))

    def rest(k: float) -> Array:
        # Long ones are met more often; of the one that is met, any part may be left.
        met = generator.gamma(1 + 1 / k, size=shape[:2]) ** (1 / k) / math.gamma(1 + 1 / k)
        return np.asarray(met * generator.random(shape[:2]))

    level = np.array(
        [NormalDist().inv_cdf((i + 0.5) / NUM_LEVELS) for i in range(NUM_LEVELS)]
    ).reshape(-1, 1, 1)
    return Draws(
        lives=weibull(pattern.life_shape),
        waits=weibull(pattern.wait_shape),
        luck=generator.random(shape),
        rest_of_life=rest(pattern.life_shape),
        rest_of_wait=rest(pattern.wait_shape),
        start=generator.random(shape[:2]),
        rate_factor=np.exp(pattern.rate_spread * level),
        wait_factor=np.exp(pattern.wait_spread * level),
    )


def _gain(seconds: Array, run: Run, *, saved: NDArray[np.bool_]) -> Array:
    """Training kept of machine `seconds` after the start: all where `saved`, else whole intervals.

    Saved seconds hold whole intervals, each with its save, and a last part of one.
    """
    period = run.interval + run.checkpoint
    whole = np.floor(seconds / period)
    rest = np.minimum(seconds - whole * period, run.interval)
    return np.asarray(whole * run.interval + np.where(saved, rest, 0.0))


def _world(run: Run, columns: int) -> tuple[Array, Array]:
    """Lives of machines, and the wait before each, in seconds."""
    draws = _draws(run.pattern)
    mean_life, mean_wait = 1 / (run.rate * draws.rate_factor), run.wait * draws.wait_factor
    lives = draws.lives[:, :, :columns] * mean_life
    waits = draws.waits[:, :, :columns] * mean_wait
    waits[:, :, 0] = 0.0
    if run.pattern.starts_anywhen:
        has_machine = draws.start < (mean_life / (mean_life + mean_wait))[:, :, 0]
        lives[:, :, 0] = np.where(
            has_machine, draws.rest_of_life * mean_life[:, :, 0], lives[:, :, 0]
        )
        waits[:, :, 0] = np.where(has_machine, 0.0, draws.rest_of_wait * mean_wait[:, :, 0])
    return lives, waits


def _simulate(run: Run) -> tuple[Array, Array, float]:
    """Return machine seconds and clock seconds of each sample, and the mean interruptions."""
    saves = max(0, math.ceil(run.work / run.interval) - 1)
    if run.rate < NEVER / 3600:
        once = np.array([run.start + run.work + saves * run.checkpoint])
        return once, once, 0.0
    # Most runs need few machines: look at a few first.
    for columns in MACHINES:
        lives, waits = _world(run, columns)
        saved = _draws(run.pattern).luck[:, :, :columns] < run.notice_saves
        starts = np.full(columns, run.restart)
        starts[0] = run.start
        trained = np.maximum(lives - starts - np.where(saved, run.notice, 0.0), 0.0)
        gains = _gain(trained, run, saved=saved)
        per_machine = gains[:, :, 1:].mean(axis=(1, 2))
        machines = run.work / np.maximum(per_machine, run.work / MOST_MACHINES)
        if 4 * machines.max() <= columns:
            break
    _check_it_ends(run, machines, per_machine)
    # Longer runs: simulate a part, then extend mean and spread (variances add up).
    parts = np.maximum(1.0, 4 * machines / columns)[:, None]
    work = (run.work / parts)[:, :, None]
    left = work - (np.cumsum(gains, axis=2) - gains)
    # What the rest takes on this machine, its saves included: at the end nothing needs saving.
    needed = left + np.maximum(np.ceil(left / run.interval) - 1, 0) * run.checkpoint
    ends = (needed <= trained) & (left > 0)
    last = np.where(ends.any(axis=2), ends.argmax(axis=2), columns - 1)[:, :, None]

    def at_last(values: Array) -> Array:
        return np.take_along_axis(values, last, axis=2)[:, :, 0]

    machine = at_last(np.cumsum(lives, axis=2) - lives + starts + needed)
    clock = machine + at_last(np.cumsum(waits, axis=2))
    return (
        _extend(machine, parts).ravel(),
        _extend(clock, parts).ravel(),
        float((last[:, :, 0] * parts).mean()),
    )


def _check_it_ends(run: Run, machines: Array, per_machine: Array) -> None:
    """Refuse a run that more than one in ten pools would never let end."""
    if np.quantile(machines, 0.9) < MOST_MACHINES / 2:
        return
    raise ValueError(
        f"the run would never end on Spot: an interruption every {1 / run.rate / 3600:.2g} h "
        f"leaves {np.median(per_machine):.3g} s of training after {run.restart:.0f} s of restart; "
        "take on-demand, save more often, or restart faster"
    )


def _extend(samples: Array, parts: Array) -> Array:
    """Turn samples of one part into samples of `parts` independent ones in a row."""
    mean = samples.mean(axis=1, keepdims=True)
    return np.asarray(mean * parts + (samples - mean) * np.sqrt(parts))
