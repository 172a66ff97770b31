"""Where to run under a deadline, by expected cost: a small dynamic program over Spot's two states.

Spot comes and goes at rates learned while the job runs, recent observations counting most. At every
decision the policy compares the expected dollars of each place until the deadline.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sizing.policies.placements import changeover, must_stay_on_demand, safety_time
from sizing.spot.replay import Place, View

Array = NDArray[np.float64]

# Steps from the start to the deadline, and the grid of rates: fine enough that finer changes the
# cost by less than a tenth of a point, coarse enough that tables are made once for many decisions.
NUM_STEPS = 240
RATES_PER_OCTAVE = 2
# The prior, in hours (sizing/spot/interruptions.py, one zone), and its weight in losses.
PRIOR_LIFE_HOURS = 2.6
PRIOR_WAIT_HOURS = 1.66
PRIOR_WEIGHT = 2.0
# Evidence this old counts half.
HALF_LIFE_HOURS = 24.0
ASK_AGAIN_SECONDS = 600.0


@dataclass(slots=True)
class Seen:
    """Discounted evidence of one of Spot's two states: hours in it, and ends of it."""

    hours: float
    ends: float

    def forget(self, hours: float) -> None:
        """Discount the evidence for the hours passed."""
        keep = 0.5 ** (hours / HALF_LIFE_HOURS)
        self.hours *= keep
        self.ends *= keep

    def rate(self, prior_hours: float) -> float:
        """Return ends per hour, prior included."""
        return (self.ends + PRIOR_WEIGHT) / (self.hours + PRIOR_WEIGHT * prior_hours)


@dataclass(slots=True)
class Lookahead:
    """Minimal expected cost under the rates seen so far; the Safety Net Rule on top."""

    spot_per_hour: float
    on_demand_per_hour: float
    up: Seen = field(default_factory=lambda: Seen(0.0, 0.0))
    down: Seen = field(default_factory=lambda: Seen(0.0, 0.0))
    last: float = 0.0
    had_spot: bool | None = None

    def choose(self, view: View) -> tuple[Place, float]:
        """Take the place with the least expected dollars."""
        self._learn(view)
        # The paper counts d alone; a loss also costs the end of a notice, or unsaved training.
        reserve = view.interval + view.notice_idle
        if must_stay_on_demand(view, reserve=reserve):
            return "on-demand", math.inf
        values = _values(
            view,
            round(math.log2(self.up.rate(PRIOR_LIFE_HOURS)) * RATES_PER_OCTAVE),
            round(math.log2(self.down.rate(PRIOR_WAIT_HOURS)) * RATES_PER_OCTAVE),
            self.spot_per_hour / self.on_demand_per_hour,
        )
        place = min(values, key=lambda name: values[name])
        if place == "spot":
            return place, math.inf
        again = view.now + ASK_AGAIN_SECONDS
        return place, min(again, max(safety_time(view) - reserve, view.now) + 1.0)

    def _learn(self, view: View) -> None:
        """Count the time since the last decision, and a change of Spot's state in it."""
        hours = (view.now - self.last) / 3600
        self.up.forget(hours)
        self.down.forget(hours)
        if self.had_spot is not None:
            state = self.up if self.had_spot else self.down
            state.hours += hours
            state.ends += view.has_spot != self.had_spot
        self.last, self.had_spot = view.now, view.has_spot


def _values(view: View, loss: int, gain: int, share: float) -> dict[Place, float]:
    """Return the expected cost of each place now, in on-demand hours."""
    job = view.job
    step = job.deadline / NUM_STEPS
    table = _table(
        loss, gain, round(share, 4), step / 3600, round(changeover(view) / step, 6),
        math.ceil(job.work / step),
    )  # fmt: skip
    row = min(int(view.now / step), NUM_STEPS - 1)
    left = view.needed / step
    change = changeover(view) / step
    options: dict[Place, float] = {"none": _at(table["wait"][row, int(view.has_spot)], left)}
    running = 0.0 if view.place == "on-demand" else change
    options["on-demand"] = _at(table["on-demand"][row, int(view.has_spot)], left + running)
    if view.has_spot:
        options["spot"] = _at(table["spot"][row, 1], left + change)
    return options


def _at(values: Array, left: float) -> float:
    """Return the value of a row between its points."""
    return float(np.interp(left, np.arange(len(values)), values))


@lru_cache(maxsize=512)
def _table(
    loss: int, gain: int, share: float, step_hours: float, change: float, units: int
) -> dict[str, Array]:
    """Return the expected cost to the deadline by step, Spot's state and work left, for each place.

    Work is in steps; a restart adds `change` to it. Late work costs far more than on demand.
    """
    lost = -math.expm1(-(2 ** (loss / RATES_PER_OCTAVE)) * step_hours)
    won = -math.expm1(-(2 ** (gain / RATES_PER_OCTAVE)) * step_hours)
    # From (no Spot, Spot) at one step to (no Spot, Spot) at the next.
    chances = np.array([[1 - won, won], [lost, 1 - lost]])
    grid = np.arange(units + 2 + math.ceil(2 * change), dtype=np.float64)
    shape = (NUM_STEPS, 2, len(grid))
    table = {place: np.full(shape, np.inf) for place in ("wait", "on-demand", "spot")}
    late = 20.0 * grid * step_hours
    # Index 0: no Spot; 1: Spot. `idle` and `running` are best values at the next step.
    idle, demand, spot = np.stack([late, late]), np.stack([late, late]), late

    def after(values: Array, done: float) -> Array:
        return np.asarray(np.interp(grid - done, grid, values))

    def more(values: Array) -> Array:
        return np.asarray(np.interp(grid + change, grid, values))

    work = np.minimum(grid, 1.0) * step_hours
    for row in range(NUM_STEPS - 1, -1, -1):
        wait = chances @ idle
        run = chances @ np.stack([after(demand[0], 1.0), after(demand[1], 1.0)]) + work
        # A loss comes in the middle of a step, on average.
        ride = (1 - lost) * (after(spot, 1.0) + share * work) + lost * (
            after(idle[0], 0.5) + share * work / 2
        )
        table["wait"][row], table["on-demand"][row], table["spot"][row, 1] = wait, run, ride
        fresh_spot = more(ride)
        none = np.stack([wait[0], np.minimum(wait[1], fresh_spot)])
        idle = np.minimum(none, np.stack([more(run[0]), more(run[1])]))
        demand = np.minimum(run, none)
        spot = ride
    return table
