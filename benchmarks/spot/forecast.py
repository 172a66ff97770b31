"""The forecast of hours and dollars on Spot, held against traces it was not made from.

Each zone is left out in turn: what is forecast for it comes from the other zones alone, its spread
included. For zones of one time taken as a fleet, rate and waits come from those of other times.
A good p50 has half of the jobs below it, a good p90 nine of ten.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.spot.settings import find_traces, group_by_time, middle
from sizing.spot.forecast import SpotForecast, forecast, replay_on_trace
from sizing.spot.pattern import POISSON, SEEN, SEEN_IN_FLEETS, WAITS_WITH_RATE, Pattern
from sizing.spot.replay import ReplayJob, ReplayOutcome, Saving
from sizing.spot.simulation import SpotRun
from sizing.spot.traces import Trace, load_fleet, load_trace, statistics

HOURS = (0.5, 2.0, 8.0, 24.0)
RESTART, CHECKPOINT, INTERVAL, NOTICE = 180.0, 1.0, 1800.0, 120.0
# In addition to what the seen zones differ by: sizing/spot/pattern.py.
_OTHER_GPUS_AND_YEARS = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A trace, and what the traces that are not of it say of the rate, the waits and spreads."""

    trace: Trace
    rate_per_hour: float
    wait_hours: float
    pattern: Pattern


def measure(*, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each kind of trace, length and model: the jobs below p50 and p90."""
    groups = group_by_time(find_traces(folder))
    rows = []
    for kind, held_out in (("zone", zones_left_out(groups)), ("fleet", fleets_left_out(groups))):
        for hours in HOURS if held_out else ():
            jobs = [_jobs(each.trace, hours) for each in held_out]
            rows += [
                _row(f"left-out {kind}s", hours, "Poisson", held_out, jobs, POISSON),
                _row(f"left-out {kind}s", hours, "planned with", held_out, jobs, None),
            ]
    return rows


def zones_left_out(groups: Sequence[Sequence[Path]]) -> list[LeftOut]:
    """Each zone with what all others say; at least three others are needed for a spread."""
    zones = [load_trace(path) for group in groups for path in group]
    if len(zones) < 4:
        raise ValueError(f"{len(zones)} traces are too few to leave one out: give at least 4")
    return [_left_out(zone, [z for z in zones if z is not zone], SEEN) for zone in zones]


def fleets_left_out(groups: Sequence[Sequence[Path]]) -> list[LeftOut]:
    """Each time's zones as a fleet: rate of the zones of other times, wait of their fleets."""
    found = []
    for group in groups:
        others = [other for other in groups if other is not group and len(other) > 1]
        if len(group) > 1 and others:
            zones = [load_trace(path) for other in others for path in other]
            waits = [statistics([load_fleet(other)]).wait_hours for other in others]
            found.append(
                replace(
                    _left_out(load_fleet(group), zones, SEEN_IN_FLEETS),
                    wait_hours=middle(waits),
                    pattern=SEEN_IN_FLEETS,
                )
            )
    return found


def _left_out(trace: Trace, others: Sequence[Trace], pattern: Pattern) -> LeftOut:
    rates = [statistics([other]).rate_per_hour for other in others]
    waits = [statistics([other]).wait_hours for other in others]
    return LeftOut(
        trace=trace,
        rate_per_hour=middle(rates),
        wait_hours=middle(waits),
        pattern=replace(
            pattern,
            rate_spread=math.hypot(stdev(map(math.log, rates)), _OTHER_GPUS_AND_YEARS),
            wait_spread=WAITS_WITH_RATE * stdev(map(math.log, waits)),
            zones_seen=len(others),
        ),
    )


def _jobs(trace: Trace, hours: float) -> list[ReplayOutcome]:
    """Return jobs from many starts."""
    return replay_on_trace(
        trace,
        jobs=[ReplayJob(work=hours * 3600, restart=RESTART, checkpoint=CHECKPOINT)],
        saving=Saving(interval=INTERVAL, notice_idle=NOTICE),
        notice_arrives=1.0,
    )


def _forecast(held_out: LeftOut, hours: float, pattern: Pattern) -> SpotForecast:
    run = SpotRun(
        work_seconds=hours * 3600,
        rate_per_hour=held_out.rate_per_hour,
        wait_seconds=held_out.wait_hours * 3600,
        restart_seconds=RESTART,
        checkpoint_seconds=CHECKPOINT,
        interval_seconds=INTERVAL,
        notice_seconds=NOTICE,
        notice_saves=1.0,
        pattern=pattern,
    )
    return forecast(run)


def _row(
    kind: str,
    hours: float,
    model: str,
    held_out: Sequence[LeftOut],
    jobs: Sequence[Sequence[ReplayOutcome]],
    pattern: Pattern | None,
) -> dict[str, Any]:
    """Return the shares below each quantile: means over the traces, and of the worst trace."""
    shares, p90s = [], []
    for each, own in zip(held_out, jobs, strict=True):
        expected = _forecast(each, hours, pattern or each.pattern)
        p90s.append(expected.hours_p90)
        limits = (
            ("seconds", expected.hours_p50), ("seconds", expected.hours_p90),
            ("spot", expected.machine_hours_p50), ("spot", expected.machine_hours_p90),
        )  # fmt: skip
        shares.append(
            [fmean(getattr(job, name) <= 3600 * limit + 1e-3 for job in own)
             for name, limit in limits]
        )  # fmt: skip
    columns = list(zip(*shares, strict=True))
    means = [100 * fmean(column) for column in columns]
    return {
        "traces": kind,
        "work, h": hours,
        "model": model,
        "% below hours p50": round(means[0]),
        "% below hours p90": round(means[1]),
        "% below dollars p50": round(means[2]),
        "% below dollars p90": round(means[3]),
        "worst trace, hours p90": round(100 * min(columns[1])),
        "worst trace, dollars p90": round(100 * min(columns[3])),
        "hours p90": f"{min(p90s):.3g} to {max(p90s):.3g}",
    }
