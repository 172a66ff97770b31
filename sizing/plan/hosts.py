"""One machine or several: the same run on one of the size and on more, and on one larger size."""

from contextlib import suppress

from contract.trainer_options import RANKS
from sizing.catalogue.prices import UnknownPriceError
from sizing.plan.plan import Plan
from sizing.plan.request import Request
from sizing.plan.side_by_side import like, problem_of, size_with_gpus


def machines(request: Request) -> str:
    """Name the machines of a request."""
    return f"{request.hosts} x {request.size}" if request.hosts > 1 else request.size


def one_or_several(plan: Plan) -> str:
    """Say in one sentence which of the ways that work costs least and which ends first, on Spot."""
    request = plan.request
    plans = [plan, *(like(plan, hosts=n) for n in reversed(RANKS) if n < request.hosts)]
    if larger := size_with_gpus(plan, request.ranks):
        # A size that the region does not sell has no price and cannot be used.
        with suppress(UnknownPriceError):
            plans.append(like(plan, size=larger, gpus=request.ranks, hosts=1))
    work = [each for each in plans if problem_of(each) is None and each.spot is not None]
    if not work:
        return "neither one machine nor several can do it on Spot"
    cheapest = min(work, key=lambda each: each.spot.usd_p50 if each.spot else 0.0)
    fastest = min(work, key=lambda each: each.spot.hours_p50 if each.spot else 0.0)
    best = f"{machines(cheapest.request)} costs least"
    best += (
        " and ends first" if fastest is cheapest else f", {machines(fastest.request)} ends first"
    )
    return f"{best}: {'; '.join(map(_figures, plans))} (p50 on Spot, EC2's prices)"


def _figures(plan: Plan) -> str:
    name, spot = machines(plan.request), plan.spot
    if spot is None or problem_of(plan) is not None:
        return f"{name} cannot"
    return (
        f"{name} {spot.hours_p50:.3g} h, ${spot.usd_p50:.2f}, interrupted "
        f"{spot.interruptions:.1f} times"
    )
