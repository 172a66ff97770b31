"""The findings against a plan: problems refuse it and name the smallest fix, warnings do not."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from sizing.catalogue import InstanceType
from sizing.catalogue.gpus import find_gpu
from sizing.models.constants import GIB
from sizing.models.fitted import fitted
from sizing.models.memory import gpu_memory
from sizing.models.notice import notice_fit
from sizing.models.restart import FILE_SECONDS
from sizing.plan.plan_inputs import asked_stages
from sizing.plan.size_plan import Plan

# Above this share of a limit a plan is called tight.
TIGHT = 0.85
# A Spot price is not a promise: only a cost higher by more than this factor is refused.
EVEN = 1.05
# Bytes needed on the volume per byte of dataset: file system and checkpoints in progress.
VOLUME_PER_DATASET = 1.1
_GET_USD = 0.4e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The findings against a plan: `problems` refuse it, `warnings` say where it is tight."""

    problems: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the plan can work at all: its only problems, if any, are price and limits."""
        return not set(self.problems) - {"spot", "deadline", "budget"}

    def accepting(self, names: tuple[str, ...]) -> "Findings":
        """Turn the problems called `names` into warnings; an unknown name is a ValueError."""
        for name in names:
            if name not in PROBLEMS:
                raise ValueError(f"accept is {name!r}; known are {', '.join(PROBLEMS)}")
        accepted = [text for name, text in self.problems.items() if name in names]
        return Findings(
            problems={name: text for name, text in self.problems.items() if name not in names},
            warnings=(*(f"accepted: {text}" for text in accepted), *self.warnings),
        )


def check_plan(plan: Plan) -> Findings:
    """Return the findings against a complete plan."""
    warnings = (
        *_resource_warnings(plan),
        *_spot_warnings(plan),
        *_deadline_warnings(plan),
        *_knowledge_warnings(plan),
    )
    return Findings(problems=find_problems(plan), warnings=warnings)


def find_problems(plan: Plan) -> dict[str, str]:
    """Return the problems by name, each with its figures and the smallest change that passes."""
    found = {name: find(plan) for name, find in PROBLEMS.items()}
    return {name: message for name, message in found.items() if message}


def _memory(plan: Plan) -> str | None:
    memory, there = plan.work.memory, plan.inputs.instance.gpu_memory_mib
    if plan.gpu_memory_need <= there:
        return None
    sharing = plan.request.runs_per_gpu(plan.inputs.instance)
    if sharing > 1 and memory.need <= there:
        return (
            f"{sharing} runs on one GPU need {plan.gpu_memory_need:,.0f} MiB of its memory, "
            f"{plan.request.size} has {there:,}; {math.floor(there / memory.need)} at a time fit"
        )
    return (
        f"stage {memory.stage} needs {memory.need:,.0f} MiB of GPU memory, {plan.request.size} has "
        f"{there:,}; {_smaller_step(plan)}"
    )


def _smaller_step(plan: Plan) -> str:
    """Return the smallest change: a smaller micro-batch (accumulated) or a larger GPU."""
    there = plan.inputs.instance.gpu_memory_mib
    request = plan.request
    current = max(s.footprint.micro_batch for s in plan.work.stages if s.footprint.kind == "train")
    for size in range(current - 1, 0, -1):
        with suppress(ValueError):  # not every number divides the batch
            smaller = replace(request, micro_batch=size)
            stages = asked_stages(smaller, plan.inputs.footprints_file)
            if max(gpu_memory(stage, plan.inputs.constants).need for stage in stages) <= there:
                return f"micro_batch={size} would fit (the global batch stays, accumulated)"
    for other in sizes_with(plan, plan.work.memory.need):
        return f"the cheapest size that fits it is {other.size}"
    return "no size in the catalogue fits it: shard the model or the optimizer"


def sizes_with(plan: Plan, gpu_memory_mib: float) -> list[InstanceType]:
    """Return the sizes with the plan's GPUs in number, each with that memory, cheapest first."""
    sizes = (size for size, _ in plan.request.prices.trainable())
    enough = (size for size in sizes if size.num_gpus >= plan.request.gpus)
    return [size for size in enough if size.gpu_memory_mib >= gpu_memory_mib]


def _host(plan: Plan) -> str | None:
    if plan.host.fits:
        return None
    host = plan.host
    if host.processes + host.unshared + host.transient <= host.usable:
        return f"{host.sentence()}; {_more_memory(plan)}"
    each = (host.need - host.peak) / host.runs
    most = math.floor((host.usable - host.peak) / each)
    change = "memory-map the data, so that the runs share it"
    if most >= 1:
        change = f"{most} at a time would fit, or {change}"
    return f"{host.sentence()}; {change}"


def _more_memory(plan: Plan) -> str:
    """Return the cheapest size that a stage can start on, with the same GPU if there is one."""
    need = plan.host.need / plan.inputs.constants.usable_memory_share
    enough = [s for s in sizes_with(plan, plan.work.memory.need) if s.memory_gib >= need]
    if not enough:
        return "no size in the catalogue has that much"
    found = min(enough, key=lambda size: not size.has_same_gpu(plan.inputs.instance))
    return f"the cheapest size whose memory suffices is {found.size}"


def _notice(plan: Plan) -> str | None:
    if plan.notice.fits or plan.spot is not None:
        return None
    return (
        f"the checkpoint of {plan.inputs.checkpoint_bytes / 1e9:.1f} GB does not fit the notice "
        f"({plan.notice.sentence()}) and the run would never end on Spot with periodic saves; "
        + _faster_upload(plan)
    )


def _faster_upload(plan: Plan) -> str:
    for other in sizes_with(plan, plan.work.memory.need):
        fit = notice_fit(
            checkpoint_bytes=plan.inputs.checkpoint_bytes * plan.request.runs,
            longest_step_seconds=plan.notice.step,
            gpu=find_gpu(other.gpu, other.gpu_memory_mib),
            instance=other,
            constants=plan.inputs.constants,
            notice_seconds=plan.request.notice_seconds,
        )
        if fit.fits:
            return f"the cheapest size whose baseline network suffices is {other.size}"
    return "use on-demand capacity (on_demand_base=1)"


def _volume(plan: Plan) -> str | None:
    dataset = plan.inputs.dataset_bytes / GIB
    need = dataset * VOLUME_PER_DATASET
    if need <= plan.request.data_gib:
        return None
    on_ebs = plan.request.data_on == "ebs"
    return (
        f"the dataset of {dataset:.1f} GiB needs {need:.0f} GiB with its file system, the "
        f"{'data volume' if on_ebs else 'instance store'} has {plan.request.data_gib}; "
        f"{'' if on_ebs else 'data_on=ebs with '}data_volume.gib={math.ceil(need)} would hold it"
    )


def _spot(plan: Plan) -> str | None:
    if plan.spot is None:
        if plan.notice.fits:
            return (
                "the run would never end on Spot: interruptions come faster than it restarts; "
                "on_demand_base=1 avoids them"
            )
        return None
    spot = plan.spot.usd_of_p50_work
    if spot <= plan.usd_on_demand * EVEN:
        return None
    an_hour, on_demand = (p.usd_per_hour for p in (plan.inputs.spot_price, plan.inputs.price))
    if an_hour >= on_demand:
        why = f"an hour costs ${an_hour:.3f} on Spot and ${on_demand:.3f} on demand"
    else:
        why = (
            f"{plan.spot.interruptions:.1f} interruptions cost {plan.restart.seconds / 60:.0f} "
            "minutes each"
        )
    return (
        f"Spot costs more than it saves: ${spot:.2f}, ${plan.usd_on_demand:.2f} on demand for the "
        f"same work, because {why}; on_demand_base=1 is cheaper"
    )


def _deadline(plan: Plan) -> str | None:
    limit, need = plan.request.deadline_hours, plan.hours_on_demand
    if limit is None or limit >= need:
        return None
    return (
        f"deadline_hours is {limit:g}, but on demand alone the run takes {need:.2f} hours; use "
        f"deadline_hours={_up(need)} or more, or a faster size"
    )


def _budget(plan: Plan) -> str | None:
    request, spot = plan.request, plan.spot
    if request.max_hours is not None and request.max_hours < plan.hours_on_demand:
        return (
            f"max_hours is {request.max_hours:g}, but the run takes {plan.hours_on_demand:.2f} "
            f"hours without an interruption; use max_hours={_up(plan.hours_on_demand)} or more"
        )
    usd = plan.usd_on_demand if spot is None or request.on_demand else spot.usd_p50
    if request.max_usd is None or request.max_usd >= usd:
        return None
    return (
        f"max_usd is {request.max_usd:g}, but half of all runs cost ${usd:.2f} or more; use more "
        f"than max_usd={_up(usd)} (volumes and addresses count, too), or a cheaper size"
    )


# The checks that may refuse a plan, by the name that `accept` takes.
PROBLEMS: Mapping[str, Callable[[Plan], str | None]] = {
    "memory": _memory,
    "host": _host,
    "notice": _notice,
    "volume": _volume,
    "spot": _spot,
    "deadline": _deadline,
    "budget": _budget,
}


def _up(value: float) -> str:
    """Return a value rounded up to at most two decimal places."""
    return f"{math.ceil(value * 100) / 100:g}"


def _faster_data(plan: Plan) -> str:
    """Return what speeds up a stage that waits for data; smaller images only if they are large."""
    inputs, request = plan.inputs, plan.request
    ways = ["a larger size of the family"]
    store = inputs.instance.instance_store_gb
    if plan.work.main.bound_by == "disk" and store and request.data_on == "ebs":
        ways.append("its instance store (data_on=nvme)")
    given = request.dataset.sample_pixels if request.dataset else None
    usual = inputs.facts.usual_pixels if inputs.facts else 0.0
    if (usual if given is None else given) > usual / 2:
        ways.append("a dataset of smaller images (data import --override shorter_side=256)")
    return " or ".join(ways)


def _resource_warnings(plan: Plan) -> list[str]:
    found = []
    main, gpu, instance = plan.work.main, plan.inputs.gpu, plan.inputs.instance
    need, there = plan.gpu_memory_need, instance.gpu_memory_mib
    if there * TIGHT < need <= there:
        found.append(f"GPU memory is tight: {need:,.0f} of {there:,} MiB")
    if plan.host.fits and plan.host.need > plan.host.usable * TIGHT:
        found.append(f"host memory is tight: {plan.host.sentence()}")
    volume = plan.inputs.dataset_bytes * VOLUME_PER_DATASET / GIB
    if plan.request.data_gib * TIGHT < volume <= plan.request.data_gib:
        found.append(f"the volume is tight: {volume:.0f} of {plan.request.data_gib} GiB")
    files, seconds = plan.inputs.num_files, plan.inputs.num_files * FILE_SECONDS
    if seconds > max(300.0, plan.inputs.network.seconds(plan.inputs.dataset_bytes)):
        found.append(
            f"a sync of {files:,} files takes about {seconds / 60:.0f} minutes and "
            f"${files * _GET_USD:.2f} on each machine (modelled; these dollars are left out here): "
            "pack them"
        )
    if main.bound_by in ("loader CPU", "disk"):
        found.append(
            f"stage {main.footprint.stage} waits for the {main.bound_by}: {_faster_data(plan)} is "
            "faster, a faster GPU is not"
        )
    half = any(stage.footprint.precision == "bfloat16" for stage in plan.work.stages)
    if half and not gpu.has_bfloat16:
        found.append(f"{gpu.name} has no bfloat16 tensor cores: float32 rates are predicted")
    idle = instance.num_gpus - plan.used_gpus
    if idle:
        found.append(f"{idle} of {instance.num_gpus} GPUs of {plan.request.size} stay idle")
    return found


def _spot_warnings(plan: Plan) -> list[str]:
    found = []
    if not plan.notice.fits:
        found.append(
            f"the checkpoint does not fit the notice ({plan.notice.sentence()}): periodic saves "
            "alone protect the run"
        )
    elif plan.notice.total > plan.notice.budget * TIGHT:
        found.append(f"the notice is tight: {plan.notice.sentence()}")
    usd = plan.spot.usd_of_p50_work if plan.spot is not None else 0.0
    if plan.usd_on_demand / EVEN < usd <= plan.usd_on_demand * EVEN:
        found.append(
            f"Spot saves nothing: ${usd:.2f} against ${plan.usd_on_demand:.2f} on demand for the "
            "same work"
        )
    if not plan.host.can_hold(plan.inputs.checkpoint_bytes):
        found.append(
            f"a checkpoint of {plan.inputs.checkpoint_bytes / 1e9:.1f} GB does not fit in the "
            "host's memory next to the run: each save keeps the GPU waiting "
            f"{plan.notice.save:.0f} s; a size with more memory saves while training continues"
        )
    waits = plan.first.sync + plan.first.data_wait
    if waits > plan.work.seconds:
        found.append(
            f"waiting for the dataset's sync ({waits / 60:.0f} min) takes longer than the run "
            f"({plan.work.seconds / 60:.0f} min)"
        )
    limit = plan.request.max_hours
    if plan.spot is not None and limit is not None and plan.spot.machine_hours_p90 > limit:
        found.append(
            f"one run in ten is billed {plan.spot.machine_hours_p90:.1f} hours or more; max_hours "
            f"is {limit:g}"
        )
    return found


def _deadline_warnings(plan: Plan) -> list[str]:
    limit = plan.request.deadline_hours
    if limit is None or not plan.hours_on_demand <= limit < plan.hours_high:
        return []
    return [
        f"one run in ten takes {plan.hours_high:.1f} hours or more even on demand; deadline_hours "
        f"is {limit:g}"
    ]


def _knowledge_warnings(plan: Plan) -> list[str]:
    found = []
    if plan.inputs.gpu.name not in fitted().runs and not plan.inputs.calibrated_by:
        found.append(plan.work.main.step.basis)
    if any(stage.footprint.basis == "modelled" for stage in plan.work.stages):
        found.append("this micro-batch was not counted: its memory is modelled from two others")
    if plan.inputs.facts is not None and plan.inputs.facts.loader_cpu_seconds == 0:
        found.append("the loader's CPU time is not known and left out")
    if not plan.inputs.knows_data:
        found.append(
            f"nothing is known of the data of {plan.request.workload}: loader, disk and sync are "
            "left out; --dataset-gib adds the sync"
        )
    if not plan.inputs.instance.network_baseline_gbps:
        found.append(f"the baseline network of {plan.request.size} is not in the catalogue")
    return found
