"""The distribution of a run's hours and dollars on Spot: a small simulation with a fixed seed.

Machine lives are as in public traces: many short, a few long, in pools that differ. docs/spot.md
compares this model with traces left out of it, `plan --run` with finished runs.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from sizing.spot import simulation
from sizing.spot.pattern import Array
from sizing.spot.simulation import SpotRun


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotForecast:
    """Hours of a run on Spot: `hours` by the clock, `machine_hours` paid for. All modelled.

    `goodput` is useful seconds per paid second, `interruptions` their mean number in the middle
    80 % of the runs: the worst pools interrupt a run dozens of times.
    `no_machine_share` is the chance that no machine comes at once, `first_wait_hours` the median of
    these waits (None: there is always one).
    `usd_of_p50_work` is the p50 of runs whose work is the p50, to compare with on demand.
    `hours` and `machine_hours` are the equally likely samples behind the quantiles.
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
    usd_p50: float
    usd_p90: float
    usd_of_p50_work: float
    hours: Array = field(compare=False, repr=False)
    machine_hours: Array = field(compare=False, repr=False)


def forecast(run: SpotRun, *, usd_per_hour: float = 0.0) -> SpotForecast:
    """Return hours and dollars, p50 and p90.

    EC2 does not bill a machine that it takes back within its first hour. That is not counted: a
    prediction that errs should err upwards. A run that cannot finish is a ValueError.
    """
    # Nothing needs to be saved after the end of the work.
    _, longest = run.work_range or (0.0, run.work_seconds)
    run = replace(run, interval_seconds=min(run.interval_seconds, longest))
    machine, clock, losses = simulation.simulate(run)
    first = simulation.first_waits(run)
    machine_p50, machine_p90 = _quantile_hours(machine)
    hours_p50, hours_p90 = _quantile_hours(clock)
    # The samples of the middle work, as if the work had no range.
    of_middle = machine.reshape(len(run.works), -1)[len(run.works) // 2]
    of_p50_work, _ = _quantile_hours(of_middle)
    return SpotForecast(
        hours_p50=hours_p50,
        hours_p90=hours_p90,
        machine_hours_p50=machine_p50,
        machine_hours_p90=machine_p90,
        interruptions=losses,
        goodput=float(run.works.mean() / machine.mean()),
        no_machine_share=float((first > 0).mean()),
        first_wait_hours=float(np.median(first[first > 0])) / 3600 if first.any() else None,
        interval_seconds=min(run.interval_seconds, run.work_seconds),
        usd_p50=machine_p50 * usd_per_hour,
        usd_p90=machine_p90 * usd_per_hour,
        usd_of_p50_work=of_p50_work * usd_per_hour,
        hours=clock / 3600,
        machine_hours=machine / 3600,
    )


def _quantile_hours(seconds: Array) -> tuple[float, float]:
    p50, p90 = np.quantile(seconds, (0.5, 0.9)) / 3600
    return float(p50), float(p90)
