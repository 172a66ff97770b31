"""The rate of Spot interruptions and the wait for the next machine, with sources.

These figures are not published for today's sizes. The ones here were computed from public traces
(benchmarks/spot/settings.py at aaa67d00) and from AWS's monthly buckets.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from sizing.spot.pattern import SEEN, SEEN_IN_FLEETS, Pattern
from sizing.spot.traces import Trace

TRACES = (
    "skypilot-org/spot-traces (paper: Can't Be Late, NSDI'24): five one-instance V100 traces of "
    "2023, a stand-in for any other GPU"
)
ADVISOR = "AWS Spot Instance Advisor, us-east-1, snapshot of 2025-07-28 (alexei-led/spotinfo)"

# Losses per machine hour and hours until the next machine, for the median zone (and fleet), because
# pools differ by factors.
# Five traces, each as one zone: 641 losses in 2,172 machine hours, 0.16 to 1.39 an hour by zone.
_ONE_POOL = (0.39, 1.66)
# Fleets of two and three zones traced at the same time, each taking the first free zone: waits of
# 0.43 to 1.17 h, median 0.61. They lose only 0.09 to 0.35 machines an hour, but they span
# regions: fleets of one region, on traces that this project does not have, lost 0.39, as zones do.
# Pools shorten waits, not lives.
_SEVERAL_POOLS = (0.39, 0.61)

# The share of machines that AWS says it interrupts in a month: (from, to); AWS's last bucket is
# "above 20 %".
ADVISOR_SHARES = {
    "g5.xlarge": (0.20, 0.30),
    "g5.2xlarge": (0.15, 0.20),
    "g5.4xlarge": (0.10, 0.15),
    "g6.2xlarge": (0.20, 0.30),
    "g6e.xlarge": (0.05, 0.10),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """Losses per machine hour, the mean wait for the next machine, and how both vary."""

    rate_per_hour: float
    wait_seconds: float
    pattern: Pattern = SEEN
    source: str


def interruptions_of(trace: Trace) -> Interruptions:
    """Return the interruptions of one trace; a machine that outlives it does not count as lost."""
    hours = sum(life.end - life.start for life in trace.lives) / 3600
    losses = sum(life.end < trace.seconds for life in trace.lives)
    waits = [after.start - before.end for before, after in pairwise(trace.lives)]
    return Interruptions(
        rate_per_hour=losses / hours,
        wait_seconds=sum(waits) / len(waits) if waits else 0.0,
        source=f"{trace.name}: {losses} losses in {hours:,.0f} machine hours",
    )


@cache
def interruptions(*, pools: int = 2) -> Interruptions:
    """Return the interruptions to plan with in a fleet of `pools` zone-and-size pools.

    The cautious reading: a field report of 2026-08-29 (lives of 21 minutes to 19 hours on one GPU
    size) is of the same order. AWS's monthly share, read as the hazard of machines that run all
    month, is 200 to 2,000 times lower: a bound, not a plan.
    """
    if pools < 1:
        raise ValueError(f"a fleet has at least one pool (zone and size), got {pools}")
    rate, wait_hours = _ONE_POOL if pools == 1 else _SEVERAL_POOLS
    which = "lives and waits of one zone" if pools == 1 else "lives of zones, waits of fleets"
    return Interruptions(
        rate_per_hour=rate,
        wait_seconds=wait_hours * 3600,
        pattern=SEEN if pools == 1 else SEEN_IN_FLEETS,
        source=f"{which} of {TRACES}",
    )
