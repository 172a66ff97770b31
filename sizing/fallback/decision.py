"""The decision: on demand if the deadline is in danger, else the market expected to be cheapest.

First its facts (the job, Spot's history so far), in seconds since the job began; then each market's
expected cost until the deadline, by a dynamic program over Spot's two states, which come and go at
the rates seen so far. Time is divided into steps, each with a row over the work left, in steps:
lists, not arrays, because it runs where numpy is not installed.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
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
    restart         seconds from a request for a machine to its first step, and waits for data
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


# Steps from the start to the deadline, and the grid of rates: fine enough that finer changes the
# cost by less than a tenth of a point, coarse enough that a table serves many decisions.
NUM_STEPS = 240
RATES_PER_OCTAVE = 2
# Late work costs this many times the on-demand price.
LATE = 20.0

Row = list[float]
# Without Spot, and with it.
Pair = tuple[Row, Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The costs from one step on, by work left: of waiting, running on demand, or on Spot.

    In on-demand hours.
    """

    wait: Pair
    run: Pair
    ride: Row


Table = tuple[Values, ...]


def expected_hours(situation: Situation, history: SpotHistory) -> dict[Market, float]:
    """Return each market's expected cost from now on, in on-demand hours."""
    step = situation.deadline / NUM_STEPS
    change = situation.change / step
    at_risk = (situation.until_next + situation.interval) / step
    table = make_table(
        round(math.log2(history.losses_per_hour) * RATES_PER_OCTAVE),
        round(math.log2(history.arrivals_per_hour) * RATES_PER_OCTAVE),
        round(situation.spot_per_hour / situation.on_demand_per_hour, 4),
        step / 3600,
        round(change, 6),
        reserve=math.ceil(at_risk + change),
        return_reserve=math.ceil(at_risk + 2 * change),
        # Rounded, so that a table serves for many lengths of the interval between commits.
        # No more work than the time there is: beyond that is danger, which needs no table.
        units=min(8 * math.ceil(situation.work / step / 8), NUM_STEPS),
    )
    values = table[min(int(max(0.0, situation.now) / step), NUM_STEPS - 1)]
    left = situation.left / step
    starting = 0.0 if situation.place == "on-demand" else change
    hold = (left + starting) * step / 3600
    if situation.spot_machine is not None:
        resuming = 0.0 if situation.place == "spot" else change
        return {
            "spot": _at(values.ride, left + resuming),
            "on-demand": min(hold, _at(values.run[1], left + starting)),
        }
    return {
        "spot": _at(values.wait[0], left),
        "bridge": _at(values.run[0], left + starting),
        "on-demand": hold,
    }


def _at(row: Row, left: float) -> float:
    """Return the value of a row between its points."""
    low = min(max(int(left), 0), len(row) - 2)
    part = min(max(left - low, 0.0), 1.0)
    return row[low] + part * (row[low + 1] - row[low])


# A table takes up to 5 MB, and the Guard's function lives for hours.
@lru_cache(maxsize=16)
def make_table(
    loss: int,
    arrival: int,
    share: float,
    step_hours: float,
    change: float,
    *,
    reserve: int,
    return_reserve: int,
    units: int,
) -> Table:
    """Return the expected costs to the deadline, from its last step back to the first.

    `loss` and `arrival` are rates as powers of two, `share` is the Spot price's share of the price
    on demand, a restart adds `change` steps of work. A job that is idle or on Spot with less slack
    than `reserve` steps is in danger; one on demand may try Spot again with `return_reserve`.
    """
    lost = -math.expm1(-(2 ** (loss / RATES_PER_OCTAVE)) * step_hours)
    won = -math.expm1(-(2 ** (arrival / RATES_PER_OCTAVE)) * step_hours)
    width = units + 2 + math.ceil(2 * change)
    late = [LATE * column * step_hours for column in range(width)]
    work = [min(column, 1) * step_hours for column in range(width)]
    hold = [column * step_hours for column in range(width)]
    start = [(column + change) * step_hours for column in range(width)]
    # The best values at the next step: idle and on demand, and riding Spot.
    idle: Pair = (late, late)
    demand: Pair = (late, late)
    spot = late
    rows = []
    for steps_left in range(1, NUM_STEPS + 1):
        safe = max(0, steps_left - reserve + 1)
        tries = max(0, steps_left - return_reserve + 1)
        waits = _capped(_expect(idle, won, lost), start, safe)
        runs = _expect(demand, won, lost)
        runs = _capped((_step(runs[0], work), _step(runs[1], work)), hold, tries)
        spot = _ride(spot, idle[0], work, lost, share)
        spot = spot[:safe] + start[safe:]
        rows.append(Values(wait=waits, run=runs, ride=spot))
        leaves: Pair = (waits[0], _least(waits[1], _shifted(spot, change)))
        idle = (
            _least(leaves[0], _shifted(runs[0], change)),
            _least(leaves[1], _shifted(runs[1], change)),
        )
        leaves = _capped(leaves, hold, tries)
        demand = _least(runs[0], leaves[0]), _least(runs[1], leaves[1])
    return tuple(reversed(rows))


def _expect(values: Pair, won: float, lost: float) -> Pair:
    """Return the expectation over whether Spot is there at the next step, by whether it is now."""
    return _mix(*values, won), _mix(*values, 1 - lost)


def _capped(values: Pair, forced: Row, safe: int) -> Pair:
    """Return the values where up to `safe` steps of work are left, and `forced` beyond."""
    return values[0][:safe] + forced[safe:], values[1][:safe] + forced[safe:]


def _least(one: Row, other: Row) -> Row:
    return list(map(min, one, other))


def _mix(without: Row, with_spot: Row, chance: float) -> Row:
    """Return the expectation over whether Spot is there at the next step."""
    return [a + chance * (b - a) for a, b in zip(without, with_spot, strict=True)]


def _step(later: Row, work: Row) -> Row:
    """Return the cost of one step on demand, then `later` with one step less to do."""
    return [later[0] + work[0], *(a + b for a, b in zip(later[:-1], work[1:], strict=True))]


def _ride(spot: Row, idle: Row, work: Row, lost: float, share: float) -> Row:
    """Return the cost of a step on Spot; a loss comes in the middle of it, on average."""
    kept = [spot[0], *spot[:-1]]
    halves = [idle[0], *((a + b) / 2 for a, b in itertools.pairwise(idle))]
    paid = share * (1 - lost / 2)
    return [
        (1 - lost) * a + lost * b + paid * c for a, b, c in zip(kept, halves, work, strict=True)
    ]


def _shifted(row: Row, change: float) -> Row:
    """Return the row with `change` steps more to do."""
    whole = int(change)
    part = change - whole
    padded = row[whole:] + [row[-1]] * (whole + 1)
    return [a + part * (b - a) for a, b in itertools.pairwise(padded)]


# What a market must save to be preferred to staying on demand: less is a rounding error.
LEAST_GAIN_HOURS = 1e-6


def decide_market(situation: Situation, history: SpotHistory) -> Decision:
    """Choose a market until the next decision, with the figures that led to it."""
    figures = {
        "hours_to_deadline": (situation.deadline - situation.now) / 3600,
        "hours_left": situation.left / 3600,
        "slack_hours": situation.slack / 3600,
        "least_slack_hours": situation.least_slack / 3600,
        "spot_losses_per_hour": history.losses_per_hour,
        "spot_arrivals_per_hour": history.arrivals_per_hour,
    }
    if situation.is_in_danger:
        reason = (
            f"the deadline is in danger: {situation.slack / 60:.1f} min may pass without progress, "
            f"and {situation.least_slack / 60:.1f} must remain"
        )
        return Decision(market="on-demand", reason=reason, figures=figures)
    if situation.place == "spot":
        # Leaving a machine that is training never pays.
        return Decision(market="spot", reason="it trains, and no deadline is near", figures=figures)
    hours = expected_hours(situation, history)
    usd = {market: each * situation.on_demand_per_hour for market, each in hours.items()}
    figures |= {f"usd_{market.replace('-', '_')}": each for market, each in usd.items()}
    expected = ", ".join(f"{name} ${each:.2f}" for name, each in usd.items())
    return Decision(
        market=_cheapest(hours), reason=f"expected until the end: {expected}", figures=figures
    )


def _cheapest(hours: Mapping[Market, float]) -> Market:
    """Return the cheapest market; on demand if no other gains anything.

    A bridge requests Spot. If returning no longer paid, each Spot machine that came would be sent
    away and requested again.
    """
    best = min(hours, key=lambda market: hours[market])
    return best if hours[best] < hours["on-demand"] - LEAST_GAIN_HOURS else "on-demand"
