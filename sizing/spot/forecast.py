"""Hours and dollars of a run on Spot, as a distribution: a small simulation with a fixed seed.

Machine lives are as in public traces: many short, a few long, in pools that differ. Modelled:
`python -m benchmarks spot --forecasts` compares it with traces, `plan --run` with finished runs.
"""

from dataclasses import dataclass, replace

import numpy as np

from sizing.spot import simulation
from sizing.spot.interval import NOTICE_ARRIVES, recommend_interval
from sizing.spot.on_trace import first_waits, replay_on_trace
from sizing.spot.pattern import SEEN, Array, Pattern
from sizing.spot.replay import Job, Saving
from sizing.spot.simulation import SimulatedRun
from sizing.spot.traces import Trace, statistics

NOTICE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Hours of a run on Spot: `hours` by the clock, `machine_hours` paid for. All modelled.

    `goodput` is useful seconds per paid second, `interruptions` their mean number in the middle
    80 % of runs: the worst pools interrupt a run dozens of times.
    `no_machine_share` is the chance that no machine comes at once, `first_wait_hours` half of these
    waits at most (None: there is always one).
    `usd_of_p50_work` is the p50 of runs whose work is the p50: to compare with on demand.
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
    return _estimate(run, trace, usd_per_hour, why)


def _estimate(run: SimulatedRun, trace: Trace | None, usd: float | None, why: str) -> Estimate:
    """Simulate the run; `why` says why its interval is what it is."""
    machine, clock, losses = _samples(run, trace)
    first = simulation.first_waits(run) if trace is None else np.array(first_waits(trace))
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
        interval_seconds=min(run.interval_seconds, run.work_seconds),
        interval_why=why,
        usd_p50=None if usd is None else machine_p50 * usd,
        usd_p90=None if usd is None else machine_p90 * usd,
        usd_of_p50_work=None if usd is None else _of_p50_work(run, trace) / 3600 * usd,
    )


def _quantiles(samples: Array) -> Array:
    return np.asarray(np.quantile(samples, (0.5, 0.9)))


def _samples(run: SimulatedRun, trace: Trace | None) -> tuple[Array, Array, float]:
    return simulation.simulate(run) if trace is None else _replay(run, trace)


def _of_p50_work(run: SimulatedRun, trace: Trace | None) -> float:
    """Return p50 of the machine seconds, had the work no range."""
    work = run.work_seconds
    middle = replace(run, work_low_seconds=work, work_high_seconds=work)
    return float(_quantiles(_samples(middle, trace)[0])[0])


def _replay(run: SimulatedRun, trace: Trace) -> tuple[Array, Array, float]:
    """Return what `simulate` does, but replayed on a trace."""
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
