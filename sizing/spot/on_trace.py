"""A run replayed from many starts in one trace: a forecast without a model of interruptions."""

import random
from collections.abc import Sequence

from sizing.spot.replay import Job, Ledger, Saving, replay
from sizing.spot.traces import Life, Trace

NUM_STARTS = 200
# A trace that is too short for a run is repeated, at most this many times.
MOST_LAPS = 50
_STRIDE = 7


def replay_on_trace(
    trace: Trace, *, jobs: Sequence[Job], saving: Saving, notice_arrives: float
) -> list[Ledger]:
    """Return one finished ledger for each start, of one of `jobs` after the other.

    A run that never ends is a ValueError.
    """
    step = trace.seconds / NUM_STARTS
    ledgers = []
    for index in range(NUM_STARTS):
        # In steps: neighbouring starts meet the same machines.
        job = jobs[_STRIDE * index % len(jobs)]
        laps = 2
        while True:
            ledger = _from_start(trace, index * step, laps, job, saving, notice_arrives)
            if ledger.is_done:
                break
            laps *= 2
            if laps > MOST_LAPS:
                raise ValueError(
                    f"the run would never end on Spot as in trace {trace.name}: "
                    f"{ledger.useful / 3600:.3g} of {job.work / 3600:.3g} h were done in "
                    f"{ledger.wall / 3600:,.0f} h"
                )
        ledgers.append(ledger)
    return ledgers


def first_waits(trace: Trace) -> list[float]:
    """Return the seconds from each start until there is a machine, the trace being repeated."""
    begins = [index * trace.seconds / NUM_STARTS for index in range(NUM_STARTS)]
    again = trace.seconds + trace.lives[0].start
    return [
        min((max(0.0, life.start - begin) for life in trace.lives if life.end > begin),
            default=again - begin)
        for begin in begins
    ]  # fmt: skip


def _from_start(
    trace: Trace, begin: float, laps: int, job: Job, saving: Saving, notice_arrives: float
) -> Ledger:
    lives = [
        Life(
            start=max(0.0, life.start + lap * trace.seconds - begin),
            end=life.end + lap * trace.seconds - begin,
            pool=life.pool,
        )
        for lap in range(laps)
        for life in trace.lives
        if life.end + lap * trace.seconds > begin
    ]
    return replay(
        lives,
        job=job,
        saving=saving,
        horizon=laps * trace.seconds - begin,
        has_notice=_luck(lives, notice_arrives),
    )


def _luck(lives: Sequence[Life], notice_arrives: float) -> list[bool]:
    """Return which losses a notice precedes; the same for the same start."""
    luck = random.Random(len(lives))
    return [luck.random() < notice_arrives for _ in lives]
