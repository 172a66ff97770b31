"""The facts for choosing a market: the job, Spot's history so far, and the choice.

Times are seconds since the job began.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

# spot: only Spot is requested, and nothing runs until it comes; bridge: an on-demand machine trains
# while Spot is requested; on-demand: an on-demand machine trains, and Spot is not requested.
Market = Literal["spot", "bridge", "on-demand"]
Place = Literal["none", "spot", "on-demand"]

# The prior, in hours (sizing/spot/interruptions.py, one zone), and its weight in ends.
PRIOR_LIFE_HOURS = 2.6
PRIOR_WAIT_HOURS = 1.66
PRIOR_WEIGHT = 2.0
# Spot's behaviour this long ago counts half.
HALF_LIFE_HOURS = 24.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Everything a policy knows, which is nothing about the future.

    left            seconds of work that remain for the trainer now
    committed_left  the same if everything after the last commit were lost now
    place           where the trainer runs
    spot_machine    the name of the live Spot machine, even if it waits while another trains
    restart         seconds from a request for a machine to its first step
    save            seconds of a commit
    interval        the most work between two commits, in seconds
    until_next      the longest time to the next decision
    """

    now: float
    deadline: float
    work: float
    left: float
    committed_left: float
    place: Place
    spot_machine: str | None
    asks_for_spot: bool
    restart: float
    save: float
    interval: float
    until_next: float
    spot_per_hour: float
    on_demand_per_hour: float

    @property
    def change(self) -> float:
        """Seconds that moving to another machine costs: the paper's changeover delay d."""
        return self.restart + self.save

    @property
    def slack(self) -> float:
        """Seconds that may pass without any progress, even if all uncommitted work is lost."""
        left = self.left if self.place == "on-demand" else self.committed_left
        return self.deadline - self.now - left

    @property
    def least_slack(self) -> float:
        """The slack below which the job belongs on demand, for good.

        All time until the next decision may be wasted, and then a machine must still be started.
        Trying Spot from an on-demand machine costs one more change, and work done there before its
        first commit may be lost.
        """
        least = self.until_next + self.change
        return least + self.change + self.interval if self.place == "on-demand" else least

    @property
    def is_in_danger(self) -> bool:
        """Whether only on-demand capacity can still meet the deadline for certain."""
        return self.slack < self.least_slack


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A market, the reason in words, and the figures that led to it."""

    market: Market
    reason: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotHistory:
    """Discounted hours of Spot's two states and their ends, as of `seconds` in the job."""

    up_hours: float = 0.0
    losses: float = 0.0
    down_hours: float = 0.0
    arrivals: float = 0.0
    seconds: float = 0.0
    # The Spot machine seen then; None: there was none, although one was requested.
    machine: str | None = None
    # Time in which Spot was not requested teaches nothing.
    was_asked: bool = False

    @property
    def losses_per_hour(self) -> float:
        """Losses per hour with a machine, prior included."""
        return (self.losses + PRIOR_WEIGHT) / (self.up_hours + PRIOR_WEIGHT * PRIOR_LIFE_HOURS)

    @property
    def arrivals_per_hour(self) -> float:
        """Arrivals per hour without a machine, prior included."""
        return (self.arrivals + PRIOR_WEIGHT) / (self.down_hours + PRIOR_WEIGHT * PRIOR_WAIT_HOURS)


def observe_market(
    history: SpotHistory, *, seconds: float, machine: str | None, asks: bool
) -> SpotHistory:
    """Count the time since the last look, and what changed in it."""
    hours = max(0.0, seconds - history.seconds) / 3600
    keep = 0.5 ** (hours / HALF_LIFE_HOURS)
    had, was_asked = history.machine is not None, history.was_asked
    is_lost = was_asked and had and machine != history.machine
    has_come = was_asked and machine is not None and machine != history.machine
    return replace(
        history,
        up_hours=history.up_hours * keep + (hours if was_asked and had else 0.0),
        losses=history.losses * keep + is_lost,
        down_hours=history.down_hours * keep + (hours if was_asked and not had else 0.0),
        arrivals=history.arrivals * keep + has_come,
        seconds=max(seconds, history.seconds),
        machine=machine,
        was_asked=asks,
    )
