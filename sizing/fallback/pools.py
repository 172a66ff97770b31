"""What Spot did in each pool to the account's own runs: small, mergeable, needed by nothing.

A pool is a size in a zone. The Guards keep spot.json in the run bucket; plans read a copy of it,
sizing/spot_history.json. Standard library only: it runs in the Guard's Lambda.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import add, attrgetter
from typing import TypeAlias

FORMAT = 1
# Pools drift: on the five traces of sizing/spot/interruptions.py, half-lives of 2 to 14 days
# forecast the second half equally well, and that of 3 keeps the p90 nearest to nine of ten.
HALF_LIFE_HOURS = 72.0
# Losses of the breaker: after two in an hour, the pool rests for about an hour.
RECENT_HALF_LIFE_HOURS = 1.0
# Older runs count next to nothing.
MOST_RUNS = 200


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """Hours and ends of machines and of waits as of `at` (seconds since 1970); older ones fade.

    `recent` are losses, of which an hour ago counts half.
    """

    at: float = 0.0
    up_hours: float = 0.0
    losses: float = 0.0
    wait_hours: float = 0.0
    waits: float = 0.0
    recent: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < 1e12 for value in _figures(self)):
            raise ValueError(f"figures must be numbers from 0, got {self}")

    def as_of(self, at: float) -> "PoolRecord":
        """Return the record as it counts at a later time."""
        if at <= self.at:
            return self
        hours = (at - self.at) / 3600
        keep, still = 0.5 ** (hours / HALF_LIFE_HOURS), 0.5 ** (hours / RECENT_HALF_LIFE_HOURS)
        _, *faded = (value * keep for value in _figures(self))
        return PoolRecord(*(at, *faded[:-1], self.recent * still))

    def __add__(self, other: "PoolRecord") -> "PoolRecord":
        """Return both as of the later one."""
        at = max(self.at, other.at)
        _, *sums = map(add, _figures(self.as_of(at)), _figures(other.as_of(at)))
        return PoolRecord(at, *sums)

    @property
    def losses_per_hour(self) -> float:
        """Losses per machine hour, for an order: one that was never seen has half of one."""
        return (self.losses + 0.5) / (self.up_hours + 1.0)

    def is_resting(self, now: float) -> bool:
        """Whether it lost machines in short order; time alone ends this."""
        return self.as_of(now).recent > 1.0


_figures = attrgetter(*PoolRecord.__slots__)
Pools: TypeAlias = Mapping[str, PoolRecord]  # by name


@dataclass(frozen=True, slots=True)
class PoolHistory:
    """What each run's machines met, by its id."""

    runs: Mapping[str, Pools] = field(default_factory=dict)

    @staticmethod
    def name(size: str, zone: str) -> str:
        """Return the name of a pool."""
        return f"{size} {zone}"

    @property
    def pools(self) -> Pools:
        """Each pool's record over all runs."""
        found: dict[str, PoolRecord] = {}
        for pools in self.runs.values():
            for name, record in pools.items():
                found[name] = found.get(name, PoolRecord()) + record
        return dict(sorted(found.items()))

    def merged(self, other: "PoolHistory") -> "PoolHistory":
        """Return the newest record of each run of both; the oldest of too many are dropped."""
        found = dict(self.runs)
        for run, pools in other.runs.items():
            if _newest(pools) >= _newest(found.get(run, {})):
                found[run] = pools
        kept = sorted(found, key=lambda run: _newest(found[run]))[-MOST_RUNS:]
        return PoolHistory({run: found[run] for run in sorted(kept)})

    def to_json(self) -> str:
        """Return the document that `from_json` reads."""
        return json.dumps({"format": FORMAT, "runs": self.runs}, default=asdict, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "PoolHistory":
        """Read a document; anything else is a ValueError."""
        try:
            runs = json.loads(text)["runs"].items()
            return cls({run: {name: PoolRecord(**each) for name, each in pools.items()}
                        for run, pools in runs})  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a history of Spot pools: {error}") from error


def _newest(pools: Pools) -> float:
    return max((each.at for each in pools.values()), default=0.0)
