"""Hours and dollars of a run on Spot, as a distribution: a small simulation with a fixed seed.

Interruptions are Poisson. Modelled, never measured: the result says so, and `sizing review` holds
it against what happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sizing.spot.interval import NEVER, NOTICE_ARRIVES, recommend_interval

NOTICE_SECONDS = 120.0
NUM_SAMPLES = 400
# Longer runs are simulated to this many machines and extended: their sum is nearly normal.
MAX_MACHINES = 32

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a run on Spot takes: `hours` by the clock, `machine_hours` paid for. All modelled."""

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
) -> Estimate:
    """Return hours and dollars, p50 and p90, of `work_seconds` of training on Spot.

    restart_seconds   boot, sync and resume of a replacement; start_seconds the first time
    checkpoint_seconds   what one periodic save keeps the GPU waiting, every interval_seconds of
        training (recommended where not given: see recommend_interval)
    notice_fits, notice_seconds, notice_arrives   the share of interruptions with a notice is saved;
        the trainer stops at the notice, so those seconds are paid for and lost
    wait_seconds   mean wait for the replacement: hours, but no machine hours

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


@cache
def _draws() -> tuple[Array, Array, Array]:
    """Draw unit lifetimes, luck with the notice, and unit waits: once, with a fixed seed."""
    generator = np.random.default_rng(20261121)
    shape = (NUM_SAMPLES, 8 * MAX_MACHINES)
    return (
        generator.exponential(size=shape),
        generator.random(size=shape),
        generator.exponential(size=shape),
    )


def _gain(seconds: Array, run: Run, *, saved: NDArray[np.bool_]) -> Array:
    """Training kept of machine `seconds` after the start: all where `saved`, else whole intervals.

    Saved seconds hold whole intervals, each with its save, and a last part of one.
    """
    period = run.interval + run.checkpoint
    whole = np.floor(seconds / period)
    rest = np.minimum(seconds - whole * period, run.interval)
    return np.asarray(whole * run.interval + np.where(saved, rest, 0.0))


def _simulate(run: Run) -> tuple[Array, Array, float]:
    """Return machine seconds and clock seconds of each sample, and the mean interruptions."""
    saves = max(0, math.ceil(run.work / run.interval) - 1)
    if run.rate < NEVER / 3600:
        once = np.array([run.start + run.work + saves * run.checkpoint])
        return once, once, 0.0
    # Most runs need few machines: look at a few first.
    for columns in (MAX_MACHINES, 8 * MAX_MACHINES):
        units, luck, waits = (draw[:, :columns] for draw in _draws())
        lives = units / run.rate
        saved = luck < run.notice_saves
        starts = np.full(columns, run.restart)
        starts[0] = run.start
        trained = np.maximum(lives - starts - np.where(saved, run.notice, 0.0), 0.0)
        gains = _gain(trained, run, saved=saved)
        per_machine = float(gains[:, 1:].mean())
        machines = run.work / per_machine if per_machine > 0 else math.inf
        if 8 * machines <= columns:
            break
    if machines > 100_000:
        raise ValueError(
            f"the run would never end on Spot: an interruption every {1 / run.rate / 3600:.2g} h "
            f"leaves {per_machine:.3g} s of training after {run.restart:.0f} s of restart; "
            "take on-demand, save more often, or restart faster"
        )
    # Longer runs: simulate a part, then extend mean and spread (variances add up).
    parts = max(1.0, machines / MAX_MACHINES)
    work = run.work / parts
    done = np.cumsum(gains, axis=1) - gains
    left = work - done
    # What the rest takes on this machine, its saves included: at the end nothing needs saving.
    needed = left + np.maximum(np.ceil(left / run.interval) - 1, 0) * run.checkpoint
    ends = (needed <= trained) & (left > 0)
    last = np.where(ends.any(axis=1), ends.argmax(axis=1), columns - 1)
    rows = np.arange(len(last))
    before = np.cumsum(lives, axis=1)[rows, last] - lives[rows, last]
    machine = before + starts[last] + needed[rows, last]
    waited = run.wait * (np.cumsum(waits, axis=1)[rows, last] - waits[rows, last])
    return (
        _extend(machine, parts),
        _extend(machine + waited, parts),
        float(last.mean()) * parts,
    )


def _extend(samples: Array, parts: float) -> Array:
    """Turn samples of one part into samples of `parts` independent ones in a row."""
    mean = samples.mean()
    return np.asarray(mean * parts + (samples - mean) * math.sqrt(parts))
