"""Expected cost of each market until the deadline: a dynamic program over Spot's two states.

Spot comes and goes at the rates seen so far. Time is divided into steps, each with a row over the
work left, in steps. Lists, not arrays: it runs where numpy is not installed.
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from sizing.fallback.situation import Market, Situation, SpotHistory

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
