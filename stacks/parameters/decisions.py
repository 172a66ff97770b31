"""Parameters that follow from the size, the workload, a manifest or the plan: one function each.

The plan is made once, from parameters that have been checked, and decides after how many hours and
dollars the run is stopped.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sizing import (
    FOOTPRINTS_FILE,
    PRICE_REGION,
    InstanceType,
    Plan,
    PriceBook,
    Request,
    catalogue,
    counted_stages,
    hourly_price,
    make_plan,
    read_manifest,
    usable_gpus,
)
from stacks.parameters import checks
from stacks.parameters.checks import refuse_unless
from stacks.parameters.context import parse_int, parse_text
from stacks.parameters.fields import MAX_HOURS, ParameterFields
from stacks.parameters.workloads import described, footprints_of, is_own

Values = Mapping[str, object]
BYTES_PER_MIB = 2**20
BYTES_PER_GIB = 2**30
# A plan that errs by this factor still lets the run finish; a run that takes longer hangs or is not
# the run that was planned. Nothing is lost: with a higher limit it continues.
PLAN_FACTOR = 3
# For so long S3 may keep a machine from reporting while it trains on.
S3_TROUBLE_SECONDS = 3600
# A shorter limit would end a run that only waits for its dataset or tries a second machine.
LEAST_HOURS = 4
HOURS_WITHOUT_PLAN = 72
# The only override that footprints cover; only a measurement shows what others change.
MICRO_BATCH = "micro_batch"
# Where a value that cdk.json leaves open comes from, as docs/parameters.md has it.
ORIGINS: Mapping[str, str] = {
    "run_id": "run-1, or NAME-1 if name is NAME: no two stacks start with the same run",
    "dataset": "the workload's name, or the source folder's if there is one",
    "dataset_gib": "total of the files in dataset_manifest; 0: unknown at synth",
    "data_volume.mib_per_second": "what the size sustains to EBS, within gp3's limits",
    "data_volume.iops": "what the throughput needs: a dataset is read in large pieces",
    "guard.heartbeat_timeout_seconds": "dataset_wait_seconds, 10 minutes of a boot and an hour of "
    "trouble with S3",
    "max_hours": "three times the plan's p90 of machine hours, at least 4; 72 without a plan for "
    "this run",
    "max_usd": "max_hours at the size's on-demand list price",
}


def dataset(_: InstanceType, values: Values) -> object:
    source = values["source"]
    return Path(str(source)).resolve().name if source else values["workload"]


def dataset_gib(_: InstanceType, values: Values) -> object:
    path = parse_text("dataset_manifest", values["dataset_manifest"])
    if not path:
        return 0
    try:
        manifest = json.loads(Path(path).read_text(encoding="utf-8"))
        return sum(int(file["bytes"]) for file in manifest["files"]) / BYTES_PER_GIB
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"dataset_manifest is {path!r}, which cannot be read as a manifest ({error}); use the "
            "manifest.json that `python -m training data make` or `upload` wrote, or nothing"
        ) from error


def data_volume_mib_per_second(instance: InstanceType, _: Values) -> object:
    sustained = int(instance.ebs_baseline_mb_per_second * 1e6 / BYTES_PER_MIB)
    return min(max(sustained, checks.GP3_MIN_MIB_PER_SECOND), checks.GP3_MAX_MIB_PER_SECOND)


def data_volume_iops(_: InstanceType, values: Values) -> object:
    name = "data_volume.mib_per_second"
    throughput = parse_int(name, values[name])
    needed = throughput * checks.GP3_IOPS_PER_MIB_PER_SECOND
    return min(max(needed, checks.GP3_MIN_IOPS), checks.GP3_MAX_IOPS)


def heartbeat_timeout_seconds(_: InstanceType, values: Values) -> object:
    name = "dataset_wait_seconds"
    healthy = parse_int(name, values[name]) + checks.BOOT_ALLOWANCE_SECONDS
    return healthy + S3_TROUBLE_SECONDS


# In this order: the IOPS follow from the throughput.
DECISIONS: Mapping[str, Callable[[InstanceType, Values], object]] = {
    "run_id": lambda _, values: f"{values['name'] or 'run'}-1",
    "dataset": dataset,
    "dataset_gib": dataset_gib,
    "data_volume.mib_per_second": data_volume_mib_per_second,
    "data_volume.iops": data_volume_iops,
    "guard.heartbeat_timeout_seconds": heartbeat_timeout_seconds,
}


def plan_sizes(p: ParameterFields, region: str = PRICE_REGION) -> tuple[Plan, ...]:
    """Return the plan on the size, and on each other one if their GPUs differ in number."""
    sizes = p.sizes if p.mix_gpu_counts else (p.size,)
    return tuple(plan_run(p, size, region) for size in sizes)


def plan_run(p: ParameterFields, size: str, region: str) -> Plan:
    """Return the run's plan on one size, at a region's prices; NotMeasuredError if it has none."""
    overrides = dict(text.split("=", 1) for text in p.overrides)
    text = overrides.get(MICRO_BATCH, "")
    micro_batch = int(text) if text.isdecimal() else None
    footprints_file = FOOTPRINTS_FILE
    if is_own(p.workload):
        own = described(p.workload, p.recipe, p.overrides, p.source, p.dataset_manifest)
        footprints_file = footprints_of(own)
    counted = counted_stages(p.workload, p.recipe, micro_batch=micro_batch, path=footprints_file)
    plan = make_plan(
        Request(
            workload=p.workload,
            recipe=p.recipe,
            size=size,
            gpus=usable_gpus(counted, catalogue.find(size).num_gpus),
            micro_batch=micro_batch,
            data_on=p.data_on,
            volume_gib=p.data_gib,
            volume_mib_per_second=p.data_volume.mib_per_second,
            root_initialization_mib_per_second=p.root_volume.initialization_mib_per_second,
            notice_seconds=p.notice_budget_seconds,
            trains_on_at_notice=p.trainer_option("notice_policy") == "train-on",
            checkpoint_interval=p.trainer_option("checkpoint_interval"),
            dataset_gib=p.dataset_gib or None,
            dataset=read_manifest(Path(p.dataset_manifest)) if p.dataset_manifest else None,
            prices=PriceBook(region=region, assumes=True),
            # Each pair of zone and size is a Spot pool; without given zones there are two.
            pools=(len(p.subnets or p.zones) or 2) * len(p.sizes),
            on_demand=p.on_demand_base > 0,
        ),
        footprints_file=footprints_file,
    )
    return with_limits(plan, p)


def with_limits(plan: Plan, p: ParameterFields) -> Plan:
    """Return the plan with the limits it is judged by, or none if it is for another run."""
    if not is_covered(p):
        return plan
    request = replace(
        plan.request,
        max_hours=p.max_hours or None,
        max_usd=p.max_usd or None,
        deadline_hours=p.deadline_hours or None,
    )
    return replace(plan, inputs=replace(plan.inputs, request=request))


def is_covered(p: ParameterFields) -> bool:
    """Whether a plan covers the length of this run: overrides and other data may change it."""
    others = unplanned(p) or p.program or p.dataset != p.workload
    return is_own(p.workload) or not others


def unplanned(p: ParameterFields) -> list[str]:
    """Return the overrides that the plan ignores; an own workload is measured with all of them."""
    names = () if is_own(p.workload) else (text.split("=")[0] for text in p.overrides)
    return sorted(set(names) - {MICRO_BATCH})


def max_hours(p: ParameterFields, plans: Sequence[Plan], _: str) -> float:
    if not plans or not is_covered(p):
        return HOURS_WITHOUT_PLAN
    return max(_most_hours(p, plan) for plan in plans)


def _most_hours(p: ParameterFields, plan: Plan) -> int:
    on_spot = plan.spot if p.on_demand_base == 0 else None
    hours = on_spot.machine_hours_p90 if on_spot else plan.hours_high
    return min(MAX_HOURS, math.ceil(max(LEAST_HOURS, PLAN_FACTOR * hours)))


def max_usd(p: ParameterFields, plans: Sequence[Plan], region: str) -> float:
    hours = {p.size: p.max_hours}
    if p.mix_gpu_counts and is_covered(p):
        # A machine with eight GPUs costs more per hour and needs fewer hours.
        hours |= {plan.request.size: min(p.max_hours, _most_hours(p, plan)) for plan in plans}
    prices = {size: hourly_price(size, region, assume=True).usd_per_hour for size in hours}
    return math.ceil(max(hours[size] * prices[size] for size in hours))


# In this order: the dollars follow from the hours.
PLANNED: Mapping[str, Callable[[ParameterFields, Sequence[Plan], str], float]] = {
    "max_hours": max_hours,
    "max_usd": max_usd,
}


def check_limits(p: ParameterFields) -> None:
    """Refuse limits that no run could keep, or that contradict each other."""
    refuse_unless(
        0 < p.max_hours <= MAX_HOURS,
        f"max_hours is {p.max_hours:g}; use more than 0, at most {MAX_HOURS}",
    )
    refuse_unless(
        not (p.deadline_hours and p.on_demand_base),
        f"deadline_hours is {p.deadline_hours:g} and on_demand_base {p.on_demand_base}: a fleet "
        "that is always on demand has nothing to fall back to; use one of them",
    )
