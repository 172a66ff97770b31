"""A bound that no policy beats: the future is known, restarts are paid, saves and notices are free.

For a job with a deadline it is a bound, not a plan: the dual of the paper's integer program
("Omniscient", Can't Be Late section 5.3), which is never above the cost of any plan.
"""

import math
from collections.abc import Sequence

from scipy.optimize import minimize_scalar

from sizing.spot.traces import SpotLife


def best_goodput(lives: Sequence[SpotLife], *, restart: float) -> float:
    """Return useful per paid second of the whole trace, taking only lives longer than a restart."""
    taken = [life.seconds for life in lives if life.seconds > restart]
    return sum(seconds - restart for seconds in taken) / sum(taken) if taken else 0.0


def least_usd(
    lives: Sequence[SpotLife],
    *,
    work: float,
    deadline: float,
    restart: float,
    spot_per_hour: float,
    on_demand_per_hour: float,
) -> float:
    """Return a lower bound of the dollars of any plan that does `work` by `deadline`.

    max over a price x per useful second of x * work - (the most that any plan earns at x). The
    inner problem has no deadline left in it and is solved exactly, stretch by stretch.
    """
    stretches = list(_stretches(lives, deadline))
    spot, on_demand = spot_per_hour / 3600, on_demand_per_hour / 3600

    def bound(price: float) -> float:
        return price * work - _most_earned(stretches, price, restart, spot, on_demand)

    # Concave in the price: searched up to one that pays any restart.
    high = on_demand * (2 + 4 * restart / max(deadline - work, restart, 1.0)) + spot
    found = minimize_scalar(lambda price: -bound(price), bounds=(0.0, high), method="bounded")
    return max(0.0, -float(found.fun))


def _stretches(lives: Sequence[SpotLife], deadline: float) -> list[tuple[float, bool]]:
    """Cut the time to the deadline where Spot comes or goes: seconds, and whether it is available.

    Two lives without a wait between them are two stretches, because the restart between is real.
    """
    cut: list[tuple[float, bool]] = []
    now = 0.0
    for life in lives:
        start, end = max(0.0, life.start), min(life.end, deadline)
        if start >= deadline or end <= now:
            continue
        if start > now:
            cut.append((start - now, False))
        cut.append((end - start, True))
        now = end
    if now < deadline:
        cut.append((deadline - now, False))
    return cut


def _most_earned(
    stretches: Sequence[tuple[float, bool]],
    price: float,
    restart: float,
    spot: float,
    on_demand: float,
) -> float:
    """Return the best plan's gain at `price` per useful second; each start forfeits `restart`."""
    idle, running = 0.0, -math.inf
    for seconds, has_spot in stretches:
        begin = max(idle, running)
        kept = max(running, begin - price * restart) + seconds * (price - on_demand)
        # A Spot machine does not outlive its stretch: the next one starts from idle.
        ridden = begin - price * restart + seconds * (price - spot)
        idle = max(begin, ridden) if has_spot else begin
        running = kept
    return max(idle, running)
