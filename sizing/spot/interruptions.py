"""How often Spot takes a machine away, and how long the next one takes to come.

Published figures, blended with the account's own history. Traces, which drills play, have the
format of skypilot-org/spot-traces: `{"metadata": {"gap_seconds": n}, "data": [...]}`, the number of
available machines per tick. None are shipped.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sizing.fallback.pools import PoolHistory, PoolRecord
from sizing.spot.pattern import SEEN, SEEN_IN_FLEETS, Pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotLife:
    """One machine, from the second when it can start until it is gone."""

    start: float
    end: float


def read_spot_counts(path: Path) -> tuple[float, list[float]]:
    """Read the seconds between ticks, and how many machines each tick has."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        gap, data = document["metadata"]["gap_seconds"], document["data"]
    except FileNotFoundError:
        raise ValueError(f"trace {path} does not exist") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not a trace: use JSON with metadata.gap_seconds and a list called data"
        ) from None
    if not isinstance(gap, int | float) or not 0 < gap < 1e6:
        raise ValueError(f"{path}: gap_seconds must be above 0 and below 1e6, got {gap!r}")
    if not isinstance(data, list) or not data:
        raise ValueError(f"{path}: data must be a list with at least one tick")
    for tick, count in enumerate(data):
        if isinstance(count, bool) or not isinstance(count, int | float) or not count >= 0:
            raise ValueError(f"{path}: tick {tick} must be a number of machines, got {count!r}")
    return float(gap), list(map(float, data))


TRACES = (
    "skypilot-org/spot-traces (paper: Can't Be Late, NSDI'24): five one-instance V100 traces of "
    "2023, a stand-in for any other GPU"
)

# Losses per machine hour and hours until the next machine, for the median zone (and fleet), because
# pools differ by factors.
# Five traces, each as one zone: 641 losses in 2,172 machine hours, 0.16 to 1.39 an hour by zone.
_ONE_POOL = (0.39, 1.66)
# Fleets of two and three zones traced at the same time, each taking the first free zone: waits of
# 0.43 to 1.17 h, median 0.61. They lose only 0.09 to 0.35 machines an hour, but they span
# regions: fleets of one region, on traces that this project does not have, lost 0.39, as zones do.
# Pools shorten waits, not lives.
_SEVERAL_POOLS = (0.39, 0.61)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """Losses per machine hour, the mean wait for the next machine, and how both vary."""

    rate_per_hour: float
    wait_seconds: float
    pattern: Pattern = SEEN
    source: str
    published_rate: float = math.inf  # the rate planned without own runs

    @property
    def saving_rate(self) -> float:
        """The rate to choose an interval by: own runs make it longer, but not shorter.

        Most losses have a notice: on the traces, shorter intervals cost more than they kept.
        """
        return min(self.rate_per_hour, self.published_rate)

    @property
    def learned_life_hours(self) -> float | None:
        """Hours between interruptions for the trainer's interval, if own runs say so."""
        return None if math.isinf(self.published_rate) else 1 / self.saving_rate


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


HISTORY_FILE = Path(__file__).parent.parent / "spot_history.json"
# The variance of the logarithm of one life or wait as a mean: bursty ones (Weibull shapes 0.55 and
# 0.5) say less than Poisson's 1. And how far a pool drifts from its own past, as a standard
# deviation: between the halves of the five traces 0.3 (rate) and 0.5 (wait), here about twice that.
_LIVES, _WAITS = (4.0, 0.5), (5.0, 1.0)


def read_history(path: Path) -> PoolHistory:
    """Read a history of pools; a ValueError if it is none."""
    try:
        return PoolHistory.from_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no Spot history {path}") from None
    except ValueError as error:
        raise ValueError(
            f"{path} is {error}; the Guard keeps one as spot.json in the run bucket"
        ) from None


def learned(prior: Interruptions, history: Path, size: str, zone: str | None) -> Interruptions:
    """Return what the account's own runs say of a size, blended with what traces say of any.

    The less the history has seen, the less it counts; without any of this size, and if it cannot be
    read, the prior stays, and its source says why.
    """
    if history == HISTORY_FILE and not history.exists():
        return prior
    try:
        pools = read_history(history).pools
    except ValueError as error:
        return replace(prior, source=f"{prior.source}; without a history: {error}")
    wanted = PoolHistory.name(size, zone or "")
    own = [each for name, each in pools.items() if name.startswith(wanted)]
    seen = sum(own, start=PoolRecord())
    if not seen.up_hours:
        return replace(prior, source=f"{prior.source}; the account's runs had no {wanted}")
    return blend(prior, seen)


def blend(prior: Interruptions, seen: PoolRecord) -> Interruptions:
    """Return the rate, the wait and their spreads after these observations."""
    pattern, comes = prior.pattern, 3600 / prior.wait_seconds
    lost, lost_spread = _blend(
        prior.rate_per_hour, pattern.rate_spread, seen.losses, seen.up_hours, *_LIVES
    )
    comes, comes_spread = _blend(comes, pattern.wait_spread, seen.waits, seen.wait_hours, *_WAITS)
    return Interruptions(
        rate_per_hour=lost,
        wait_seconds=3600 / comes,
        pattern=replace(pattern, rate_spread=lost_spread, wait_spread=comes_spread),
        source=f"own runs, of which the newest count most: {seen.losses:.1f} losses in "
        f"{seen.up_hours:,.0f} machine hours; blended with {prior.source}",
        published_rate=prior.rate_per_hour,
    )


def _blend(
    prior: float, spread: float, ends: float, hours: float, burst: float, drift: float
) -> tuple[float, float]:
    """Return median and spread of a rate after `ends` in `hours`, all of them log-normal.

    Half an end of the prior's counts as seen, too.
    """
    ends, hours = ends + 0.5, hours + 0.5 / prior
    variance = burst / ends + drift**2
    share = spread**2 / (spread**2 + variance)
    return prior * (ends / hours / prior) ** share, math.sqrt(share * variance)
