"""A run simulated on machines of unknown pools: machine and clock seconds of every sample.

The work may be uncertain too: each of its steps of probability meets the same machines.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from sizing.spot.pattern import (
    MACHINES,
    NEVER,
    NOTICE_ARRIVES,
    NOTICE_SECONDS,
    NUM_LEVELS,
    NUM_LUCKS,
    SEEN,
    Array,
    Pattern,
    draws_of,
)

MOST_MACHINES = 200_000
# Equal steps of probability of the work; p10, p50 and p90 are the midpoints of three of them.
NUM_WORKS = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotRun:
    """A run on Spot and what interrupts it; times in seconds.

    work_range   p10 and p90 of the work, which adds uncertainty to that of the interruptions
    restart_seconds   what the start of a machine adds: boot, resume, and waits for data
    first_seconds   the same of the first machine; None: as much
    checkpoint_seconds   GPU time that a periodic save costs, every interval_seconds of training
    notice_saves   the share of interruptions with a notice that is long enough to save
    notice_seconds   the part of such a notice without training (contract.notice.idle_seconds),
        which is paid for
    wait_seconds   mean wait for a replacement: clock hours, but not machine hours
    pattern   how bursty and how uncertain: as in public traces by default
    """

    work_seconds: float
    work_range: tuple[float, float] | None = None
    rate_per_hour: float
    restart_seconds: float
    first_seconds: float | None = None
    checkpoint_seconds: float = 0.0
    interval_seconds: float
    notice_saves: float = NOTICE_ARRIVES
    notice_seconds: float = NOTICE_SECONDS
    wait_seconds: float = 0.0
    pattern: Pattern = SEEN

    def __post_init__(self) -> None:
        for name in ("work_seconds", "interval_seconds", *_FROM_ZERO):
            value, is_zero_fine = getattr(self, name), name in _FROM_ZERO
            if math.isnan(value) or value < 0 or (value == 0 and not is_zero_fine):
                least = "at least" if is_zero_fine else "more than"
                raise ValueError(f"{name} must be {least} 0, got {value}")
            if math.isinf(value):
                raise ValueError(f"{name} must be a finite number, got {value}")

    @property
    def first(self) -> float:
        """Seconds of the first machine's start."""
        return self.restart_seconds if self.first_seconds is None else self.first_seconds

    @property
    def works(self) -> Array:
        """The seconds of work in equal steps of probability, log-normal on each side of p50."""
        low, high = self.work_range or (self.work_seconds, self.work_seconds)
        return work_steps(low, self.work_seconds, high)


def work_steps(low: float, middle: float, high: float) -> Array:
    """Spread p10, p50 and p90 of a work over equal steps of probability, log-normal each side."""
    if low == middle == high:
        return np.array([middle])
    spread = NormalDist().inv_cdf(0.9)
    steps = [NormalDist().inv_cdf((place + 0.5) / NUM_WORKS) / spread for place in range(NUM_WORKS)]
    return np.array([middle * (high / middle if z > 0 else middle / low) ** z for z in steps])


_FROM_ZERO = (
    "rate_per_hour",
    "restart_seconds",
    "checkpoint_seconds",
    "notice_saves",
    "notice_seconds",
    "wait_seconds",
)


def _gain(seconds: Array, run: SpotRun, *, saved: NDArray[np.bool_]) -> Array:
    """Return the training kept of `seconds` after the start: all if `saved`, else whole intervals.

    The seconds are whole intervals, each with its save, and a part of one.
    """
    period = run.interval_seconds + run.checkpoint_seconds
    whole = np.floor(seconds / period)
    rest = np.minimum(seconds - whole * period, run.interval_seconds)
    return np.asarray(whole * run.interval_seconds + np.where(saved, rest, 0.0))


def _world(run: SpotRun, columns: int) -> tuple[Array, Array]:
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


def first_waits(run: SpotRun) -> Array:
    """Return the wait of each sample for its first machine, in seconds."""
    if run.rate_per_hour < NEVER:
        return np.zeros(1)
    return _world(run, 1)[1].ravel()


def simulate(run: SpotRun) -> tuple[Array, Array, float]:
    """Return machine seconds and clock seconds of each sample, and the mean interruptions.

    Axes: work, level of the pools, luck, machine; each work meets the same machines.
    """
    works = run.works
    if run.rate_per_hour < NEVER:
        saves = np.maximum(np.ceil(works / run.interval_seconds) - 1, 0)
        once = run.first + works + saves * run.checkpoint_seconds
        # Repeat each, so that a quantile is one of them and not between two.
        once = np.repeat(once, NUM_LEVELS * NUM_LUCKS)
        return once, once, 0.0
    # Most runs need few machines: try a few first.
    for columns in MACHINES:
        lives, waits = _world(run, columns)
        saved = draws_of(run.pattern).luck[:, :, :columns] < run.notice_saves
        idle = np.where(saved, run.notice_seconds, 0.0)
        starts = np.where(np.arange(columns), run.restart_seconds, run.first)
        trained = np.maximum(lives - starts - idle, 0.0)
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
    # The rest's seconds on this machine, saves included; the end needs none.
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


def _check_it_ends(run: SpotRun, machines: Array, per_machine: Array) -> None:
    """Refuse a run that would never end in more than one of ten pools."""
    if np.quantile(machines, 0.9) < MOST_MACHINES / 2:
        return
    raise ValueError(
        f"the run would never end on Spot: an interruption every {1 / run.rate_per_hour:.2g} h "
        f"leaves {np.median(per_machine):.3g} s of training after {run.restart_seconds:.0f} s of "
        "restart; use on-demand capacity, save more often, or restart faster"
    )


def _middle_mean(values: Array) -> float:
    """Return the mean without the lowest and highest tenths."""
    cut = values.size // 10
    return float(np.sort(values, axis=None)[cut : values.size - cut].mean())


def _extend(samples: Array, parts: Array) -> Array:
    """Turn samples of one part into samples of `parts` independent parts in a row."""
    mean = samples.mean(axis=-1, keepdims=True)
    return np.asarray(mean * parts + (samples - mean) * np.sqrt(parts))
