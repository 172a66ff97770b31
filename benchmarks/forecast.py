"""The forecast of hours on Spot beside jobs replayed on the public traces.

A good p50 has half of the jobs below it, a good p90 nine of ten. `planned` is what `sizing plan`
uses; it knows nothing of the trace. Its spreads come from the same five traces: this is in sample.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.spot import find_traces, group_by_time
from sizing.spot.forecast import estimate
from sizing.spot.interruptions import interruptions
from sizing.spot.pattern import POISSON, SEEN, Pattern
from sizing.spot.replay import Job, Saving, SpotOnly, replay
from sizing.spot.traces import Life, Trace, load_fleet, load_trace, statistics

HOURS = (2.0, 8.0, 24.0)
RESTART, CHECKPOINT, INTERVAL, NOTICE = 180.0, 1.0, 1800.0, 120.0


def measure(*, folder: Path, num_starts: int) -> list[dict[str, Any]]:
    """Return a row for each fleet, length and model: the shares of jobs below p50 and p90."""
    paths = find_traces(folder)
    fleets = [load_fleet(group) for group in group_by_time(paths) if len(group) > 1]
    rows = []
    for pools, traces in ((1, [load_trace(path) for path in paths]), (2, fleets)):
        for hours in HOURS if traces else ():
            jobs = {trace.name: _jobs(trace, hours, num_starts) for trace in traces}
            for name, pattern, knows in (
                ("Poisson, the trace's own rate", POISSON, True),
                ("Poisson, planned", POISSON, False),
                ("bursty and unsure, planned", SEEN, False),
            ):
                rows.append(_row(pools, hours, name, pattern, knows, traces, jobs))
    return rows


def _jobs(trace: Trace, hours: float, num_starts: int) -> list[tuple[float, float]]:
    """Return clock and machine hours of jobs from many starts; infinite if unfinished."""
    done = []
    for index in range(num_starts):
        begin = 0.7 * trace.seconds * index / max(num_starts - 1, 1)
        seen = replay(
            [
                Life(start=max(0.0, life.start - begin), end=life.end - begin)
                for life in trace.lives
                if life.end > begin
            ],
            job=Job(work=hours * 3600, restart=RESTART, checkpoint=CHECKPOINT),
            saving=Saving(interval=INTERVAL, notice_idle=NOTICE),
            placement=SpotOnly(),
            horizon=trace.seconds - begin,
        )
        late = not seen.is_done
        done.append((math.inf, math.inf) if late else (seen.wall / 3600, seen.spot / 3600))
    return done


def _row(
    pools: int,
    hours: float,
    name: str,
    pattern: Pattern,
    knows: bool,
    traces: Sequence[Trace],
    jobs: dict[str, list[tuple[float, float]]],
) -> dict[str, Any]:
    """Return the shares below each quantile, averaged over the traces."""
    planned = interruptions("g5.xlarge", pools=pools)
    shares = []
    for trace in traces:
        seen = statistics([trace])
        forecast = estimate(
            work_seconds=hours * 3600,
            rate_per_hour=seen.rate_per_hour if knows else planned.rate_per_hour,
            wait_seconds=seen.wait_hours * 3600 if knows else planned.wait_seconds,
            restart_seconds=RESTART,
            checkpoint_seconds=CHECKPOINT,
            interval_seconds=INTERVAL,
            notice_seconds=NOTICE,
            notice_arrives=1.0,
            pattern=pattern,
        )
        limits = (
            (0, forecast.hours_p50), (0, forecast.hours_p90),
            (1, forecast.machine_hours_p50), (1, forecast.machine_hours_p90),
        )  # fmt: skip
        own = jobs[trace.name]
        shares.append(
            [sum(job[k] <= limit + 1e-6 for job in own) / len(own) for k, limit in limits]
        )
    means = [100 * sum(column) / len(column) for column in zip(*shares, strict=True)]
    return {
        "fleet": "one zone" if pools == 1 else "zones of one time",
        "work, h": hours,
        "model": name,
        "% below hours p50": round(means[0]),
        "hours p90": round(means[1]),
        "% below machine hours p50": round(means[2]),
        "its p90": round(means[3]),
    }
