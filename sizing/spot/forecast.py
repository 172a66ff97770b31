"""The distribution of a run's hours and dollars on Spot: a small simulation with a fixed seed.

Machine lives are as in public traces: many short, a few long, in pools that differ. docs/spot.md
compares this model with traces left out of it, `plan --run` with finished runs.
A trace replaces the model: the run is then replayed from many starts in it.
"""

import random
from dataclasses import dataclass, field, replace

import numpy as np

from sizing.spot import simulation
from sizing.spot.interruptions import SpotLife, Trace
from sizing.spot.pattern import Array
from sizing.spot.replay import Replay, ReplayJob, ReplayOutcome
from sizing.spot.simulation import SpotRun

NUM_STARTS = 200
# A trace that is too short for a run is repeated, at most this many times.
MOST_LAPS = 50
_STRIDE = 7


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


def forecast(
    run: SpotRun, *, usd_per_hour: float = 0.0, trace: Trace | None = None
) -> SpotForecast:
    """Return hours and dollars, p50 and p90; a trace replaces the run's rate, wait and pattern.

    EC2 does not bill a machine that it takes back within its first hour. That is not counted: a
    prediction that errs should err upwards. A run that cannot finish is a ValueError.
    """
    # Nothing needs to be saved after the end of the work.
    _, longest = run.work_range or (0.0, run.work_seconds)
    run = replace(run, interval_seconds=min(run.interval_seconds, longest))
    machine, clock, losses = _samples(run, trace)
    first = simulation.first_waits(run) if trace is None else np.array(_first_waits(trace))
    machine_p50, machine_p90 = _quantile_hours(machine)
    hours_p50, hours_p90 = _quantile_hours(clock)
    # The samples of the middle work, as if the work had no range.
    if trace is None:
        of_middle = machine.reshape(len(run.works), -1)[len(run.works) // 2]
    else:
        of_middle = _samples(replace(run, work_range=None), trace)[0]
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


def _samples(run: SpotRun, trace: Trace | None) -> tuple[Array, Array, float]:
    """Return machine seconds and clock seconds of each sample, and the mean interruptions."""
    if trace is None:
        return simulation.simulate(run)
    jobs = [
        ReplayJob(
            work=work,
            first=run.first,
            restart=run.restart_seconds,
            checkpoint=run.checkpoint_seconds,
            interval=run.interval_seconds,
            notice_idle=run.notice_seconds,
        )
        for work in map(float, run.works)
    ]
    done = _replay_on_trace(trace, jobs, run.notice_saves)
    return (
        np.array([each.spot for each in done]),
        np.array([each.seconds for each in done]),
        sum(each.losses for each in done) / len(done),
    )


def _replay_on_trace(
    trace: Trace, jobs: list[ReplayJob], notice_arrives: float
) -> list[ReplayOutcome]:
    """Return one finished job for each start, cycling through `jobs`.

    A run that never ends is a ValueError.
    """
    step = trace.seconds / NUM_STARTS
    finished = []
    for index in range(NUM_STARTS):
        # In steps: neighbouring starts meet the same machines.
        job = jobs[_STRIDE * index % len(jobs)]
        laps = 2
        while True:
            done = _from_start(trace, index * step, laps, job, notice_arrives)
            if done.is_done:
                break
            laps *= 2
            if laps > MOST_LAPS:
                raise ValueError(
                    f"the run would never end on Spot as in trace {trace.name}: "
                    f"{done.useful / 3600:.3g} of {job.work / 3600:.3g} h were done in "
                    f"{done.seconds / 3600:,.0f} h"
                )
        finished.append(done)
    return finished


def _first_waits(trace: Trace) -> list[float]:
    """Return the seconds from each start until there is a machine, repeating the trace."""
    begins = [index * trace.seconds / NUM_STARTS for index in range(NUM_STARTS)]
    again = trace.seconds + trace.lives[0].start
    return [
        min((max(0.0, life.start - begin) for life in trace.lives if life.end > begin),
            default=again - begin)
        for begin in begins
    ]  # fmt: skip


def _from_start(
    trace: Trace, begin: float, laps: int, job: ReplayJob, notice_arrives: float
) -> ReplayOutcome:
    lives = [
        SpotLife(
            start=max(0.0, life.start + lap * trace.seconds - begin),
            end=life.end + lap * trace.seconds - begin,
        )
        for lap in range(laps)
        for life in trace.lives
        if life.end + lap * trace.seconds > begin
    ]
    # The same start has notices before the same losses.
    luck = random.Random(len(lives))
    return Replay(
        lives=lives,
        job=job,
        horizon=laps * trace.seconds - begin,
        has_notice=[luck.random() < notice_arrives for _ in lives],
    ).run()
