"""After how much a run is stopped: hours and dollars by its plan, and what is refused of them.

Each deciding function is named like its parameter; its docstring is the reason that `python -m
stacks.parameters` prints.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from sizing.catalogue import PRICE_REGION
from sizing.catalogue.refresh import PriceBook
from sizing.models.footprints import NotMeasuredError
from sizing.plan.dataset import read_manifest
from sizing.plan.plan import Plan, make_plan
from sizing.plan.request import Request
from stacks.parameters import decisions
from stacks.parameters.checks import refuse_unless
from stacks.parameters.fields import ParameterFields

# A plan that errs by this factor still lets the run finish; a run that takes longer hangs or is not
# the run that was planned. Nothing is lost: with a higher limit it goes on.
PLAN_FACTOR = 3
# A shorter limit would end a run that only waits for its dataset or tries a second machine.
LEAST_HOURS = 4
HOURS_WITHOUT_PLAN = 72
MAX_HOURS = 8760
# The only override that footprints cover; what others change, only a measurement shows.
MICRO_BATCH = "micro_batch"


def plan_run(p: ParameterFields, region: str = PRICE_REGION) -> Plan:
    """Return the plan of the stack's run, at a region's prices.

    Of its limits it knows those that it can judge.
    """
    overrides = dict(text.split("=", 1) for text in p.overrides)
    micro_batch = overrides.get(MICRO_BATCH, "")
    # A limit is judged by a plan of the run itself only.
    is_judged = is_covered(p)
    return make_plan(
        Request(
            workload=p.workload,
            recipe=p.recipe,
            size=p.size,
            micro_batch=int(micro_batch) if micro_batch.isdecimal() else None,
            data_on=p.data_on,
            volume_gib=p.data_gib,
            volume_mib_per_second=p.data_volume_mib_per_second,
            root_initialization_mib_per_second=p.root_initialization_mib_per_second,
            notice_seconds=p.notice_budget_seconds,
            trains_on_at_notice=p.notice_policy == "train-on",
            checkpoint_interval=p.checkpoint_interval,
            dataset_gib=p.dataset_gib or None,
            dataset=read_manifest(Path(p.dataset_manifest)) if p.dataset_manifest else None,
            prices=PriceBook(region=region),
            # Each pair of zone and size is a Spot pool; without given zones there are two.
            pools=max(1, len(p.zones) or 2) * len(p.sizes),
            on_demand=p.on_demand_base > 0,
            max_hours=p.max_hours or None if is_judged else None,
            max_usd=p.max_usd or None if is_judged else None,
            deadline_hours=p.deadline_hours or None if is_judged else None,
        )
    )


def is_covered(p: ParameterFields) -> bool:
    """Whether a plan covers the length of this run: overrides and other data may change it."""
    names = {text.split("=")[0] for text in p.overrides}
    return names <= {MICRO_BATCH} and p.dataset == decisions.dataset(p.instance, asdict(p))


def max_hours(p: ParameterFields) -> float:
    """three times the plan's p90 of machine hours, at least 4; 72 without a plan of this run"""
    if not is_covered(p):
        return HOURS_WITHOUT_PLAN
    try:
        plan = plan_run(p)
    except NotMeasuredError:
        return HOURS_WITHOUT_PLAN
    on_spot = plan.spot if p.on_demand_base == 0 else None
    hours = on_spot.machine_hours_p90 if on_spot else plan.hours_high
    return min(MAX_HOURS, math.ceil(max(LEAST_HOURS, PLAN_FACTOR * hours)))


def max_usd(p: ParameterFields) -> float:
    """max_hours at the size's on-demand list price"""
    return math.ceil(p.max_hours * (p.instance.on_demand_usd_per_hour or 0.0))


# In this order: the dollars follow from the hours.
PLANNED: Mapping[str, Callable[[ParameterFields], float]] = {
    decide.__name__: decide for decide in (max_hours, max_usd)
}


def check_limits(p: ParameterFields) -> None:
    """Refuse limits that no run could keep, or that contradict each other."""
    refuse_unless(
        0 < p.max_hours <= MAX_HOURS,
        f"max_hours is {p.max_hours:g}; give more than 0, at most {MAX_HOURS}",
    )
    refuse_unless(
        0 <= p.max_usd < 1e6, f"max_usd is {p.max_usd:g}; give dollars, or 0 for no limit"
    )
    for name, nothing in (("max_wait_hours", "to wait forever"), ("deadline_hours", "for none")):
        hours = getattr(p, name)
        refuse_unless(
            0 <= hours <= MAX_HOURS,
            f"{name} is {hours:g}; give hours, at most {MAX_HOURS}, or 0 {nothing}",
        )
    refuse_unless(
        not (p.deadline_hours and p.on_demand_base),
        f"deadline_hours is {p.deadline_hours:g} and on_demand_base {p.on_demand_base}: a fleet "
        "that is always on demand has nothing to fall back to; give one of them",
    )
