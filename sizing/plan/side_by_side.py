"""Several equal runs: one after the other, side by side, or each on a GPU of its own."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sizing.catalogue import InstanceType
from sizing.catalogue.prices import UnknownPriceError
from sizing.plan.checks import find_problems
from sizing.plan.plan import Plan, make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Hours until the last run ends and dollars of them all, on demand; `problem` if it cannot."""

    what: str
    size: str
    hours: float
    usd: float
    problem: str | None


def ways(plan: Plan, runs: int) -> list[Way]:
    """Return the ways to do `runs` runs like the plan's, in the order of the docstring."""
    one = like(plan, runs=1)
    hours = (runs * one.work.seconds + one.restart.seconds) / 3600
    after = Way(
        what="one after the other",
        size=plan.request.size,
        hours=hours,
        usd=hours * one.inputs.price.usd_per_hour,
        problem=problem_of(one),
    )
    found = [after, _way("side by side", like(plan, runs=runs))]
    several = size_with_gpus(plan, runs * plan.request.gpus)
    if several:
        # A size that the region does not sell has no price and cannot be used.
        with suppress(UnknownPriceError):
            found.append(_way("a GPU each", like(plan, runs=runs, size=several)))
    return found


def like(plan: Plan, **changes: Any) -> Plan:
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
        problem=problem_of(plan),
    )


def problem_of(plan: Plan) -> str | None:
    """Why the plan cannot work, Spot aside; None if it can."""
    found = {name: text for name, text in find_problems(plan).items() if name != "spot"}
    return next(iter(found.values()), None)


def size_with_gpus(plan: Plan, gpus: int) -> str | None:
    """The cheapest size that has as many of the plan's GPUs, if it is another one."""
    instance = plan.inputs.instance
    if instance.num_gpus >= gpus:
        return None
    same = (i.size for i, _ in plan.request.prices.trainable() if _is_same(i, instance, gpus))
    return next(same, None)


def _is_same(one: InstanceType, other: InstanceType, gpus: int) -> bool:
    same = (one.gpu, one.gpu_memory_mib) == (other.gpu, other.gpu_memory_mib)
    return same and one.num_gpus >= gpus
