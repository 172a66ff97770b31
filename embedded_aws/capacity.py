"""EC2's capacity in the embedded AWS: which pools have machines, at what price, and until when.

A pool is a size in a zone, sold as Spot or on demand. Without a course, it has unlimited machines
at no cost. An instance that EC2 takes back is marked here first and runs until its notice is over.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

# An event's source, detail-type, detail and resources.
ServiceEvent: TypeAlias = tuple[str, str, dict[str, Any], list[str]]
SPOT, ON_DEMAND = "spot", "on-demand"
MARKETS = (SPOT, ON_DEMAND)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """A pool of EC2 machines: a size in a zone, in one market."""

    market: str
    size: str
    zone: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """The capacity over time of the pools that match `market`, `size` and `zone` (may have *).

    `steps` are (second, machines) in order, counted from the course's start; before the first, and
    where `machines` is infinite, there is no limit. `has_notice`: whether instances get a notice.
    """

    market: str = SPOT
    size: str = "*"
    zone: str = "*"
    steps: tuple[tuple[float, float], ...] = ((0.0, math.inf),)
    usd_per_hour: float = 0.0
    has_notice: bool = True

    def __post_init__(self) -> None:
        if self.market not in MARKETS:
            raise ValueError(f"market is {self.market!r}; use {' or '.join(MARKETS)}")
        seconds = [second for second, _ in self.steps]
        if not seconds or seconds != sorted(seconds) or any(n < 0 for _, n in self.steps):
            raise ValueError(
                "a course needs steps of [second, machines] in order of time, with 0 or more "
                f"machines; got {[list(step) for step in self.steps]}"
            )

    def covers(self, pool: Pool) -> bool:
        return self.market == pool.market and all(
            fnmatchcase(value, pattern)
            for value, pattern in ((pool.size, self.size), (pool.zone, self.zone))
        )

    def machines(self, second: float) -> float:
        """Return how many machines a pool has `second` seconds after the course's start."""
        index = bisect_right([start for start, _ in self.steps], second)
        return self.steps[index - 1][1] if index else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The reason for which EC2 ends an instance, and the time on the capacity's clock."""

    ends_at: float
    reason: str
    has_notice: bool
    # EC2 replaces a lost instance once it has ended, but not excess capacity.
    is_excess: bool = False


@dataclass(kw_only=True, slots=True)
class Capacity:
    """EC2's current capacity; `endings` are the instances that it is taking back, by id.

    `powered` are instances whose machine is on: once terminated, they shut down until it is off.
    """

    notice_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    spot_usd: Callable[[str], float] | None = None  # EmbeddedAws's
    endings: dict[str, Ending] = field(default_factory=dict)
    powered: set[str] = field(default_factory=set)
    fleets: list[Any] = field(default_factory=list)  # every InstanceFleet of the account
    at_risk: set[str] = field(default_factory=set)  # instances with a rebalance recommendation
    events: list[ServiceEvent] = field(default_factory=list)  # of services, not yet on the bus
    _courses: list[tuple[float, Course]] = field(default_factory=list)

    def follow(self, courses: Sequence[Course]) -> None:
        """Start courses now; where two cover the same pool, the later one wins."""
        self._courses += [(self.clock(), course) for course in courses]

    def reset(self) -> None:
        """Forget all courses: every pool has machines again."""
        self._courses.clear()

    def machines(self, pool: Pool) -> float:
        """Return how many machines the pool has for all customers; we are the only one."""
        found = self._course(pool)
        return math.inf if found is None else found[1].machines(self.clock() - found[0])

    def usd_per_hour(self, pool: Pool) -> float:
        """Return the pool's price."""
        found = self._course(pool)
        return 0.0 if found is None else found[1].usd_per_hour

    def reclaim(self, instance_id: str, pool: Pool) -> None:
        """Mark an instance whose pool has no machine left for it."""
        found = self._course(pool)
        has_notice = found is None or found[1].has_notice
        self.end(instance_id, f"no {pool.market} capacity left", has_notice=has_notice)

    def end(
        self, instance_id: str, reason: str, *, has_notice: bool, is_excess: bool = False
    ) -> None:
        """Mark an instance: it ends when its notice is over, or now without one."""
        ends_at = self.clock() + (self.notice_seconds if has_notice else 0.0)
        self.endings[instance_id] = Ending(
            ends_at=ends_at, reason=reason, has_notice=has_notice, is_excess=is_excess
        )

    def _course(self, pool: Pool) -> tuple[float, Course] | None:
        covering = (each for each in reversed(self._courses) if each[1].covers(pool))
        return next(covering, None)
