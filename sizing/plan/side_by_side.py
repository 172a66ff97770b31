"""Several equal runs: one after the other, side by side, or each on a GPU of its own.

And one run: on one machine of the size, on more, or on one larger size.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from contract.trainer_options import RANKS
from sizing.catalogue.prices import UnknownPriceError
from sizing.plan.checks import find_problems
from sizing.plan.plan_inputs import Request
from sizing.plan.size_plan import Plan, make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Hours until the last run ends and dollars for all, on demand; `problem` if impossible."""

    what: str
    size: str
    hours: float
    usd: float
    problem: str | None


def ways(plan: Plan, runs: int) -> list[Way]:
    """Return the ways to do `runs` runs like the plan's, in the order of the module's docstring."""
    one = _like(plan, runs=1)
    hours = (runs * one.work.seconds + one.first.seconds) / 3600
    usd = hours * one.inputs.price.usd_per_hour
    after = replace(_way("one after the other", one), hours=hours, usd=usd)
    found = [after, _way("side by side", _like(plan, runs=runs))]
    several = _size_with_gpus(plan, runs * plan.request.gpus)
    if several:
        # A size that the region does not sell has no price and cannot be used.
        with suppress(UnknownPriceError):
            found.append(_way("a GPU each", _like(plan, runs=runs, size=several)))
    return found


def _like(plan: Plan, **changes: Any) -> Plan:
    """Return the plan of a changed request, with the same footprints and constants."""
    inputs = plan.inputs
    return make_plan(
        replace(plan.request, **changes),
        footprints_file=inputs.footprints_file,
        constants=inputs.constants,
    )


def _way(what: str, plan: Plan) -> Way:
    return Way(
        what=what,
        size=plan.request.size,
        hours=plan.hours_on_demand,
        usd=plan.usd_on_demand,
        problem=_problem_of(plan),
    )


def _problem_of(plan: Plan) -> str | None:
    """Return why the plan cannot work, Spot aside; None if it can."""
    found = {name: text for name, text in find_problems(plan).items() if name != "spot"}
    return next(iter(found.values()), None)


def _size_with_gpus(plan: Plan, gpus: int) -> str | None:
    """Return the cheapest size with this many of the plan's GPUs, if it is a different one."""
    instance = plan.inputs.instance
    if instance.num_gpus >= gpus:
        return None
    sizes = (size for size, _ in plan.request.prices.trainable() if size.num_gpus >= gpus)
    return next((size.size for size in sizes if size.has_same_gpu(instance)), None)


def machines(request: Request) -> str:
    """Name the machines of a request."""
    return f"{request.hosts} x {request.size}" if request.hosts > 1 else request.size


def one_or_several(plan: Plan) -> str:
    """Say in one sentence which workable way costs least and which ends first, on Spot."""
    request = plan.request
    plans = [plan, *(_like(plan, hosts=n) for n in reversed(RANKS) if n < request.hosts)]
    if larger := _size_with_gpus(plan, request.ranks):
        # A size that the region does not sell has no price and cannot be used.
        with suppress(UnknownPriceError):
            plans.append(_like(plan, size=larger, gpus=request.ranks, hosts=1))
    work = [each for each in plans if _problem_of(each) is None and each.spot is not None]
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
    if spot is None or _problem_of(plan) is not None:
        return f"{name} cannot"
    return (
        f"{name} {spot.hours_p50:.3g} h, ${spot.usd_p50:.2f}, interrupted "
        f"{spot.interruptions:.1f} times"
    )
