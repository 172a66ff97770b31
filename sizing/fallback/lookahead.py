"""Expected dollars of each market until the deadline: a dynamic program over Spot's two states.

Rows are steps in time, columns work left in steps. Lists, not arrays: it runs where numpy is not.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from sizing.fallback.evidence import Evidence
from sizing.fallback.situation import Market, Situation

# Steps from the start to the deadline, and the grid of rates: fine enough that finer changes the
# cost by less than a tenth of a point, coarse enough that a table serves many decisions.
NUM_STEPS = 240
RATES_PER_OCTAVE = 2
# Work that is late costs this many times the price on demand.
LATE = 20.0

Row = list[float]


@dataclass(frozen=True, slots=True)
class Table:
    """Cost by step and work left, in hours on demand: index 0 without Spot, 1 with it."""

    wait: tuple[list[Row], list[Row]]
    run: tuple[list[Row], list[Row]]
    ride: list[Row]


def expected_hours(situation: Situation, evidence: Evidence) -> dict[Market, float]:
    """Return what each market is expected to cost from now on, in on-demand hours."""
    step = situation.deadline / NUM_STEPS
    change = situation.change / step
    table = make_table(
        round(math.log2(evidence.losses_per_hour) * RATES_PER_OCTAVE),
        round(math.log2(evidence.arrivals_per_hour) * RATES_PER_OCTAVE),
        round(situation.spot_per_hour / situation.on_demand_per_hour, 4),
        step / 3600,
        round(change, 6),
        round((situation.until_next + situation.interval) / step, 6),
        math.ceil(situation.work / step),
    )
    row = min(int(max(0.0, situation.now) / step), NUM_STEPS - 1)
    left = situation.left / step
    starting = 0.0 if situation.place == "on-demand" else change
    hold = (left + starting) * step / 3600
    if situation.spot_machine is not None:
        resuming = 0.0 if situation.place == "spot" else change
        return {
            "spot": _at(table.ride[row], left + resuming),
            "on-demand": min(hold, _at(table.run[1][row], left + starting)),
        }
    return {
        "spot": _at(table.wait[0][row], left),
        "bridge": _at(table.run[0][row], left + starting),
        "on-demand": hold,
    }


def _at(row: Row, left: float) -> float:
    """Return the value of a row between its points."""
    low = min(max(int(left), 0), len(row) - 2)
    part = min(max(left - low, 0.0), 1.0)
    return row[low] + part * (row[low + 1] - row[low])


@lru_cache(maxsize=512)
def make_table(
    loss: int,
    arrival: int,
    share: float,
    step_hours: float,
    change: float,
    at_risk: float,
    units: int,
) -> Table:
    """Return the expected costs to the deadline; a restart adds `change` steps to the work.

    `at_risk` steps may be lost between decisions: whoever cannot afford it stays on demand.
    `share` is the Spot price's share of the price on demand; the rates are powers of two.
    """
    lost = -math.expm1(-(2 ** (loss / RATES_PER_OCTAVE)) * step_hours)
    won = -math.expm1(-(2 ** (arrival / RATES_PER_OCTAVE)) * step_hours)
    width = units + 2 + math.ceil(2 * change)
    late = [LATE * column * step_hours for column in range(width)]
    work = [min(column, 1) * step_hours for column in range(width)]
    # The best values at the next step: idle and on demand, without and with Spot; riding Spot.
    idle, demand, spot = (late, late), (late, late), late
    wait: tuple[list[Row], list[Row]] = ([], [])
    run: tuple[list[Row], list[Row]] = ([], [])
    ride: list[Row] = []
    hold = [column * step_hours for column in range(width)]
    start = [(column + change) * step_hours for column in range(width)]
    for steps_left in range(1, NUM_STEPS + 1):
        # More work than this is in danger: it goes on demand and stays there.
        safe = max(0, math.floor(steps_left - at_risk - change) + 1)
        tries = max(0, math.floor(steps_left - at_risk - 2 * change) + 1)
        waits = _mix(*idle, won), _mix(*idle, 1 - lost)
        runs = _step(_mix(*demand, won), work), _step(_mix(*demand, 1 - lost), work)
        rides = _ride(spot, idle[0], work, lost, share)
        waits = [row[:safe] + start[safe:] for row in waits]
        runs = [row[:tries] + hold[tries:] for row in runs]
        rides = rides[:safe] + start[safe:]
        for rows, values in zip((*wait, *run, ride), (*waits, *runs, rides), strict=True):
            rows.append(values)
        none = waits[0], list(map(min, waits[1], _shifted(rides, change)))
        idle = (
            list(map(min, none[0], _shifted(runs[0], change))),
            list(map(min, none[1], _shifted(runs[1], change))),
        )
        none = none[0][:tries] + hold[tries:], none[1][:tries] + hold[tries:]
        demand = list(map(min, runs[0], none[0])), list(map(min, runs[1], none[1]))
        spot = rides
    for rows in (*wait, *run, ride):
        rows.reverse()
    return Table(wait, run, ride)


def _mix(without: Row, with_spot: Row, chance: float) -> Row:
    """Return the expectation over whether Spot is there at the next step."""
    return [a + chance * (b - a) for a, b in zip(without, with_spot, strict=True)]


def _step(later: Row, work: Row) -> Row:
    """Return the cost of one step on demand, then `later` with one step less to do."""
    return [later[0] + work[0], *(a + b for a, b in zip(later[:-1], work[1:], strict=True))]


def _ride(spot: Row, idle: Row, work: Row, lost: float, share: float) -> Row:
    """Return the cost of a step on Spot; a loss comes in the middle of it, on average."""
    kept = [spot[0], *spot[:-1]]
    halves = [idle[0], *((a + b) / 2 for a, b in zip(idle[:-1], idle[1:], strict=True))]
    paid = share * (1 - lost / 2)
    return [
        (1 - lost) * a + lost * b + paid * c for a, b, c in zip(kept, halves, work, strict=True)
    ]


def _shifted(row: Row, change: float) -> Row:
    """Return the row with `change` steps more to do."""
    whole = int(change)
    part = change - whole
    padded = row[whole:] + [row[-1]] * (whole + 1)
    return [a + part * (b - a) for a, b in zip(padded[: len(row)], padded[1:], strict=False)]
