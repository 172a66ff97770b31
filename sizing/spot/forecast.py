"""Hours and dollars of a run on Spot, as a distribution: a small simulation with a fixed seed.

Machine lives are as in public traces: many short, a few long, in pools that differ. Modelled:
`python -m benchmarks forecast` compares it with traces, `sizing review` with finished runs.
"""

import math
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from sizing.spot.interval import NEVER, NOTICE_ARRIVES, recommend_interval
from sizing.spot.on_trace import first_waits, replay_on_trace
from sizing.spot.pattern import MACHINES, SEEN, Array, Pattern, draws_of
from sizing.spot.replay import Job, Saving
from sizing.spot.traces import Trace, statistics

NOTICE_SECONDS = 120.0
MOST_MACHINES = 200_000
# Equal steps of probability of the work; p10, p50 and p90 are the middles of three of them.
NUM_WORKS = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Hours of a run on Spot: `hours` by the clock, `machine_hours` paid for. All modelled.

    `goodput` is useful seconds per paid second, `interruptions` their mean number in the middle
    80 % of runs: the worst pools interrupt a run dozens of times.
    `no_machine_share` is the chance that no machine comes at once, `first_wait_hours` half of these
    waits at most (None: there is always one). `usd_of_p50_work` is the p50 of runs whose work is the
    p50: what on demand costs is compared with it, the same work on both.
    """

    hours_p50: float
    hours_p90: float
    machine_hours_p50: float
    machine_hours_p90: float
    interruptions: float
    goodput: float
    no_machine_share: float
    first_wait_hours: float | None
    interval_seconds: float
    interval_why: str
    usd_p50: float | None = None
    usd_p90: float | None = None
    usd_of_p50_work: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """The run to simulate and what interrupts it; times in seconds."""

    work_seconds: float
    work_low_seconds: float
    work_high_seconds: float
    rate_per_hour: float
    restart_seconds: float
    start_seconds: float
    checkpoint_seconds: float
    interval_seconds: float
    notice_seconds: float
    notice_saves: float
    wait_seconds: float
    pattern: Pattern

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "pattern"):
            value, is_zero_fine = getattr(self, name), name not in _ABOVE_ZERO
            if math.isnan(value) or value < 0 or (value == 0 and not is_zero_fine):
                least = "at least" if is_zero_fine else "more than"
                raise ValueError(f"{name} must be {least} 0, got {value}")
            if math.isinf(value):
                raise ValueError(f"{name} must be a finite number, got {value}")

    @property
    def works(self) -> Array:
        """The seconds of work in equal steps of probability: log-normal on each side of p50."""
        low, middle, high = self.work_low_seconds, self.work_seconds, self.work_high_seconds
        if low == middle == high:
            return np.array([middle])
        spread = NormalDist().inv_cdf(0.9)
        steps = [
            NormalDist().inv_cdf((place + 0.5) / NUM_WORKS) / spread for place in range(NUM_WORKS)
        ]
        return np.array([middle * (high / middle if z > 0 else middle / low) ** z for z in steps])


_ABOVE_ZERO = ("work_seconds", "work_low_seconds", "work_high_seconds", "interval_seconds")


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
    work_range: tuple[float, float] | None = None,
    pattern: Pattern = SEEN,
    trace: Trace | None = None,
) -> Estimate:
    """Return hours and dollars, p50 and p90, of `work_seconds` of training on Spot.

    restart_seconds   boot, sync and resume of a replacement; start_seconds: of the first machine
    checkpoint_seconds   what one periodic save keeps the GPU waiting, every interval_seconds of
        training (recommended where not given: see recommend_interval)
    notice_fits, notice_seconds, notice_arrives   the share of interruptions with a notice is saved;
        this much of a notice is not trained in (contract.notice.idle_seconds), but paid for
    wait_seconds   mean wait for the replacement: clock hours, but not machine hours
    work_range   p10 and p90 of the work, which is then uncertain beside the interruptions
    pattern   how bursty and how uncertain: as in public traces, or POISSON
    trace   replayed from many starts instead of rate, wait and pattern

    EC2 does not bill a machine that it takes back within its first hour. That is not counted: a
    prediction that errs should err upwards. A run that cannot finish is a ValueError.
    """
    if trace is not None:
        rate_per_hour = statistics([trace]).rate_per_hour
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
    low, high = work_range or (work_seconds, work_seconds)
    run = SimulatedRun(
        work_seconds=work_seconds,
        work_low_seconds=low,
        work_high_seconds=high,
        rate_per_hour=rate_per_hour,
        restart_seconds=restart_seconds,
        start_seconds=restart_seconds if start_seconds is None else start_seconds,
        checkpoint_seconds=checkpoint_seconds,
        # Nothing needs to be saved after the end of the work.
        interval_seconds=min(interval_seconds, high),
        notice_seconds=notice_seconds,
        notice_saves=notice_arrives if notice_fits else 0.0,
        wait_seconds=wait_seconds,
        pattern=pattern,
    )
    machine, clock, losses = _samples(run, trace)
    first = _first_waits(run) if trace is None else np.array(first_waits(trace))
    usd = usd_per_hour
    machine_p50, machine_p90 = (float(v) / 3600 for v in _quantiles(machine))
    hours_p50, hours_p90 = (float(v) / 3600 for v in _quantiles(clock))
    return Estimate(
        hours_p50=hours_p50,
        hours_p90=hours_p90,
        machine_hours_p50=machine_p50,
        machine_hours_p90=machine_p90,
        interruptions=losses,
        goodput=float(run.works.mean() / machine.mean()),
        no_machine_share=float((first > 0).mean()),
        first_wait_hours=float(np.median(first[first > 0])) / 3600 if first.any() else None,
        interval_seconds=min(run.interval_seconds, work_seconds),
        interval_why=why,
        usd_p50=None if usd is None else machine_p50 * usd,
        usd_p90=None if usd is None else machine_p90 * usd,
        usd_of_p50_work=None if usd is None else _of_p50_work(run, trace) / 3600 * usd,
    )


def _quantiles(samples: Array) -> Array:
    """Return p50 and p90; each sample is the middle of its step of probability."""
    return np.asarray(np.quantile(samples, (0.5, 0.9), method="hazen"))


def _samples(run: SimulatedRun, trace: Trace | None) -> tuple[Array, Array, float]:
    return _simulate(run) if trace is None else _replay(run, trace)


def _of_p50_work(run: SimulatedRun, trace: Trace | None) -> float:
    """Return p50 of the machine seconds, had the work no range."""
    work = run.work_seconds
    middle = replace(run, work_low_seconds=work, work_high_seconds=work)
    return float(_quantiles(_samples(middle, trace)[0])[0])


def _gain(seconds: Array, run: SimulatedRun, *, saved: NDArray[np.bool_]) -> Array:
    """Return the training kept of `seconds` after the start: all if `saved`, else whole intervals.

    The seconds are whole intervals, each with its save, and a part of one.
    """
    period = run.interval_seconds + run.checkpoint_seconds
    whole = np.floor(seconds / period)
    rest = np.minimum(seconds - whole * period, run.interval_seconds)
    return np.asarray(whole * run.interval_seconds + np.where(saved, rest, 0.0))


def _world(run: SimulatedRun, columns: int) -> tuple[Array, Array]:
    """Return the lives of machines and the wait before each, in seconds."""
    draws = draws_of(run.pattern)
    mean_life, mean_wait = (
        3600 / (run.rate_per_hour * draws.rate_factor),
        run.wait_seconds * draws.wait_factor,
    )
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


def _first_waits(run: SimulatedRun) -> Array:
    """Return the wait of each sample for its first machine, in seconds."""
    if run.rate_per_hour < NEVER:
        return np.zeros(1)
    return _world(run, 1)[1].ravel()


def _simulate(run: SimulatedRun) -> tuple[Array, Array, float]:
    """Return machine seconds and clock seconds of each sample, and the mean interruptions.

    Axes: work, level of the pools, luck, machine; each work meets the same machines.
    """
    works = run.works
    if run.rate_per_hour < NEVER:
        saves = np.maximum(np.ceil(works / run.interval_seconds) - 1, 0)
        once = run.start_seconds + works + saves * run.checkpoint_seconds
        return once, once, 0.0
    # Most runs need few machines: try a few first.
    for columns in MACHINES:
        lives, waits = _world(run, columns)
        saved = draws_of(run.pattern).luck[:, :, :columns] < run.notice_saves
        starts = np.full(columns, run.restart_seconds)
        starts[0] = run.start_seconds
        trained = np.maximum(lives - starts - np.where(saved, run.notice_seconds, 0.0), 0.0)
        gains = _gain(trained, run, saved=saved)
        per_machine = gains[:, :, 1:].mean(axis=(1, 2))
        machines = works[:, None] / np.maximum(per_machine, works[:, None] / MOST_MACHINES)
        if 4 * machines.max() <= columns:
            break
    _check_it_ends(run, machines, per_machine)
    # Longer runs: simulate a part, then extrapolate mean and spread (variances add up).
    parts = np.maximum(1.0, 4 * machines / columns)[:, :, None]
    part = works[:, None, None] / parts
    left = part[:, :, :, None] - (np.cumsum(gains, axis=2) - gains)
    # What the rest takes on this machine, saves included; the end needs none.
    needed = left + np.maximum(np.ceil(left / run.interval_seconds) - 1, 0) * run.checkpoint_seconds
    ends = (needed <= trained) & (left > 0)
    last = np.where(ends.any(axis=3), ends.argmax(axis=3), columns - 1)

    def at_last(values: Array) -> Array:
        return np.take_along_axis(values, last[:, :, :, None], axis=3)[:, :, :, 0]

    machine = at_last(np.cumsum(lives, axis=2) - lives + starts + needed)
    clock = machine + at_last(np.cumsum(waits, axis=2)[None])
    return (
        _extend(machine, parts).ravel(),
        _extend(clock, parts).ravel(),
        _middle_mean(last * parts),
    )


def _replay(run: SimulatedRun, trace: Trace) -> tuple[Array, Array, float]:
    """Return what `_simulate` does, but replayed on a trace."""
    jobs = [
        Job(
            work=work,
            restart=run.restart_seconds,
            checkpoint=run.checkpoint_seconds,
            notice=run.notice_seconds,
        )
        for work in map(float, run.works)
    ]
    saving = Saving(interval=run.interval_seconds, notice_idle=run.notice_seconds)
    ledgers = replay_on_trace(trace, jobs=jobs, saving=saving, notice_arrives=run.notice_saves)
    # The first start may take longer than later ones.
    more = run.start_seconds - run.restart_seconds
    return (
        np.array([ledger.spot + more for ledger in ledgers]),
        np.array([ledger.wall + more for ledger in ledgers]),
        sum(ledger.interruptions for ledger in ledgers) / len(ledgers),
    )


def _check_it_ends(run: SimulatedRun, machines: Array, per_machine: Array) -> None:
    """Refuse a run that would never end in more than one of ten pools."""
    if np.quantile(machines, 0.9) < MOST_MACHINES / 2:
        return
    raise ValueError(
        f"the run would never end on Spot: an interruption every {1 / run.rate_per_hour:.2g} h "
        f"leaves {np.median(per_machine):.3g} s of training after {run.restart_seconds:.0f} s of "
        "restart; use on-demand capacity, save more often, or restart faster"
    )


def _middle_mean(values: Array) -> float:
    """Return the mean without the lowest and the highest tenth."""
    cut = values.size // 10
    return float(np.sort(values, axis=None)[cut : values.size - cut].mean())


def _extend(samples: Array, parts: Array) -> Array:
    """Turn samples of one part into samples of `parts` independent parts in a row."""
    mean = samples.mean(axis=-1, keepdims=True)
    return np.asarray(mean * parts + (samples - mean) * np.sqrt(parts))
