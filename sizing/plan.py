"""The plan of a run on one size: fits, hours, dollars, notice, and what speaks against it.

Composes the models; no formula of its own but the sum over stages. `python -m sizing plan` prints
it, cdk synth annotates it, `sizing review` holds a receipt against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from contract.auto_interval import choose_interval
from contract.grammar import parse_interval
from contract.notice import MAX_SECONDS, idle_seconds
from sizing import catalogue, footprints
from sizing.calibration import CALIBRATION_FILE, calibrated
from sizing.catalogue import Instance, Price
from sizing.constants import GIB, Constants
from sizing.data_path import (
    DATA,
    GP3_MB_PER_SECOND,
    DataFacts,
    Rate,
    epoch_data,
    network_rate,
    volume_rate,
)
from sizing.footprints import Footprint
from sizing.gpus import Gpu, find_gpu
from sizing.host import HostMemory, host_memory
from sizing.memory import GpuMemory, gpu_memory
from sizing.notice import NoticeFit, Restart, notice_fit, restart
from sizing.plan_checks import find_problems, find_warnings
from sizing.refresh import load, prices
from sizing.spot import Estimate, Trace, estimate, interruptions
from sizing.spot.interruptions import Interruptions, interruptions_of
from sizing.spot.interval import NEVER
from sizing.step_time import StepTime, step_time

# PCIe between GPUs of a g5, and what gradients of all ranks take on it (ring: twice their bytes).
_ALLREDUCE_GB_PER_SECOND = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be planned. Everything but the first three has the stack's default."""

    workload: str
    recipe: str
    size: str
    micro_batch: int | None = None
    gpus: int = 1
    runs: int = 1
    volume_gib: int = 200
    volume_mib_per_second: float | None = None
    notice_seconds: float | None = None
    trains_on_at_notice: bool = True
    checkpoint_interval: str = "auto"
    dataset_gib: float | None = None
    unshared_gib: float = 0.0
    rate_per_hour: float | None = None
    trace: Trace | None = None
    pools: int = 2
    price_cache: Path | None = None
    max_hours: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage: its time by what takes it, and its memory."""

    footprint: Footprint
    step: StepTime
    epoch_seconds: float
    evaluation_seconds: float
    seconds: float
    bound_by: str
    memory: GpuMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is predicted. `problems` refuse the plan, `warnings` say where it is tight."""

    request: Request
    instance: Instance
    gpu: Gpu
    constants: Constants
    calibrated_by: tuple[str, ...]
    stages: tuple[StagePlan, ...]
    host: HostMemory
    dataset_bytes: float
    notice: NoticeFit
    restart: Restart
    interruptions: Interruptions
    spot: Estimate | None
    price: Price
    spot_price: Price
    data_known: bool
    footprints_file: Path
    problems: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def main(self) -> StagePlan:
        """The stage that takes longest."""
        return max(self.stages, key=lambda stage: stage.seconds)

    @property
    def memory(self) -> GpuMemory:
        """Of the stage that needs most."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.need)

    @property
    def work_seconds(self) -> float:
        """Training, preparing and evaluating, with no interruption and no start."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def usd_per_hour(self) -> float:
        """Of the instance on demand."""
        return self.price.usd_per_hour

    @property
    def usd_spot_per_hour(self) -> float:
        """Of the instance on Spot."""
        return self.spot_price.usd_per_hour

    @property
    def hours_on_demand(self) -> float:
        """One uninterrupted run, its start included."""
        return (self.work_seconds + self.restart.seconds) / 3600

    @property
    def usd_on_demand(self) -> float:
        """Of the instance alone."""
        return self.hours_on_demand * self.usd_per_hour

    @property
    def checkpoint_bytes(self) -> int:
        """Of the largest checkpoint."""
        return max(stage.footprint.checkpoint_bytes for stage in self.stages)

    @property
    def copy_fits_host(self) -> bool:
        """Whether a checkpoint can wait in host memory while it is uploaded."""
        return self.checkpoint_bytes <= self.host.cache_bytes

    @property
    def fits(self) -> bool:
        """Whether it can work at all: no problem but dollars."""
        return not set(self.problems) - {"spot"}


def make_plan(
    request: Request,
    *,
    footprints_file: Path = footprints.FOOTPRINTS_FILE,
    calibration_file: Path = CALIBRATION_FILE,
    constants: Constants | None = None,
) -> Plan:
    """Return the plan; a request that cannot be planned is a ValueError in one sentence."""
    instance = catalogue.find(request.size)
    _check(request, instance)
    gpu = find_gpu(instance.gpu, instance.gpu_memory_mib)
    learned, runs = calibrated(
        request.workload, request.recipe, request.size, instance.gpu, path=calibration_file
    )
    used = constants or learned
    stages = footprints.stages(
        request.workload, request.recipe, micro_batch=request.micro_batch, path=footprints_file
    )
    facts = DATA.get(request.workload)
    samples = max(stage.samples_per_epoch + stage.validation_samples for stage in stages)
    dataset_bytes = _dataset_bytes(request, facts, samples)
    volume = volume_rate(instance, _volume_mb_per_second(request, instance), used)
    host = host_memory(
        instance,
        used,
        runs=request.runs,
        data_bytes_each=request.unshared_gib * GIB,
        shared_bytes=dataset_bytes,
        load_copies=2.0 if request.unshared_gib else 1.0,
    )
    planned = tuple(
        _stage(stage, request, gpu, instance, used, facts, volume, host) for stage in stages
    )
    plan = _without_interruptions(request, gpu, used, planned, host, dataset_bytes)
    plan = replace(plan, calibrated_by=runs, footprints_file=footprints_file)
    plan = replace(plan, spot=_forecast(plan))
    return replace(plan, problems=find_problems(plan), warnings=find_warnings(plan))


def _check(request: Request, instance: Instance) -> None:
    if instance.num_gpus < 1:
        raise ValueError(
            f"size {request.size} has no whole NVIDIA GPU to train on; "
            "the smallest that has one is g4dn.xlarge"
        )
    if not 1 <= request.gpus <= instance.num_gpus:
        raise ValueError(f"gpus is {request.gpus}; {request.size} has {instance.num_gpus}")
    for name in ("volume_gib", "runs"):
        if getattr(request, name) < 1:
            raise ValueError(f"{name} is {getattr(request, name)}; give at least 1")
    for name in ("dataset_gib", "unshared_gib", "rate_per_hour", "volume_mib_per_second"):
        value = getattr(request, name)
        if value is not None and not 0 <= value < 1e6:
            raise ValueError(f"{name} is {value}; give a number from 0 to a million")
    if request.rate_per_hour is not None and request.trace is not None:
        raise ValueError("a rate and a trace contradict each other; give one of them")
    if request.notice_seconds is not None and not 0 <= request.notice_seconds <= MAX_SECONDS:
        raise ValueError(
            f"notice_seconds is {request.notice_seconds:g}; EC2 gives {MAX_SECONDS} at most, "
            f"give 0 to {MAX_SECONDS}"
        )


def _dataset_bytes(request: Request, facts: DataFacts | None, samples: int) -> float:
    if request.dataset_gib:
        return request.dataset_gib * GIB
    return samples * facts.dataset_bytes_per_sample if facts else 0.0


def _volume_mb_per_second(request: Request, instance: Instance) -> float:
    """As given, else what the stack provisions: what the size sustains, gp3's floor at least."""
    if request.volume_mib_per_second:
        return request.volume_mib_per_second * 1.048576
    return max(GP3_MB_PER_SECOND, min(instance.ebs_baseline_mb_per_second, 2000 * 1.048576))


def _stage(
    footprint: Footprint,
    request: Request,
    gpu: Gpu,
    instance: Instance,
    constants: Constants,
    facts: DataFacts | None,
    volume: Rate,
    host: HostMemory,
) -> StagePlan:
    """One stage's time: GPU, loader and disk work side by side, the slowest decides."""
    step = step_time(footprint, gpu, constants, world=request.gpus)
    if request.gpus > 1:
        exchanged = 2 * footprint.gradient_bytes * (request.gpus - 1) / request.gpus
        step = replace(step, optimizer=step.optimizer + exchanged / 1e9 / _ALLREDUCE_GB_PER_SECOND)
    waits = {step.bound_by: step.seconds * footprint.steps_per_epoch * request.runs}
    if facts is not None:
        prepares = footprint.kind == "prepare"
        each = facts.dataset_bytes_per_sample if prepares else facts.epoch_bytes_per_sample
        data = epoch_data(
            samples=footprint.samples_per_epoch,
            facts=facts,
            instance=instance,
            volume=volume,
            cache_bytes=host.cache_bytes,
            epoch_bytes=footprint.samples_per_epoch * each,
            runs=request.runs,
        )
        waits |= {"loader CPU": data.loader, "disk": data.disk}
    bound_by = max(waits, key=lambda name: waits[name])
    evaluations = -(-footprint.epochs // max(1, footprint.eval_every_epochs))
    # Forward is a third of a step's work.
    a_sample = (step.compute + step.traffic) / footprint.global_batch / 3
    evaluation = footprint.validation_samples * a_sample * evaluations * request.runs
    return StagePlan(
        footprint=footprint,
        step=step,
        epoch_seconds=waits[bound_by],
        evaluation_seconds=evaluation,
        seconds=waits[bound_by] * footprint.epochs + evaluation,
        bound_by=bound_by,
        memory=gpu_memory(footprint, constants),
    )


@cache
def _interruptions(size: str, pools: int) -> Interruptions:
    return interruptions(size, pools=pools)


def _without_interruptions(
    request: Request,
    gpu: Gpu,
    constants: Constants,
    stages: tuple[StagePlan, ...],
    host: HostMemory,
    dataset_bytes: float,
) -> Plan:
    """Notice, restart and prices; what interruptions make of it comes after."""
    instance = catalogue.find(request.size)
    checkpoint = max(stage.footprint.checkpoint_bytes for stage in stages)
    taken = _interruptions(request.size, request.pools)
    if request.rate_per_hour is not None:
        taken = replace(taken, rate_per_hour=request.rate_per_hour, source="given")
    if request.trace is not None:
        taken = interruptions_of(request.trace)
    answers = load(request.price_cache) if request.price_cache else None
    price, spot_price = prices(request.size, answers)
    return Plan(
        request=request,
        instance=instance,
        gpu=gpu,
        constants=constants,
        calibrated_by=(),
        stages=stages,
        host=host,
        dataset_bytes=dataset_bytes,
        notice=notice_fit(
            checkpoint_bytes=checkpoint,
            longest_step_seconds=max(stage.step.seconds for stage in stages),
            gpu=gpu,
            instance=instance,
            constants=constants,
            notice_seconds=request.notice_seconds,
        ),
        restart=restart(
            dataset_bytes=dataset_bytes,
            checkpoint_bytes=checkpoint,
            artifact_bytes=_artifact_bytes(request, stages),
            network=network_rate(instance, constants),
            volume=volume_rate(instance, _volume_mb_per_second(request, instance), constants),
            constants=constants,
        ),
        interruptions=taken,
        spot=None,
        # Where no price is known, this says so.
        price=price or catalogue.hourly_price(request.size),
        spot_price=spot_price or catalogue.spot_price(request.size),
        data_known=request.workload in DATA or bool(request.dataset_gib),
        footprints_file=footprints.FOOTPRINTS_FILE,
    )


def _artifact_bytes(request: Request, stages: tuple[StagePlan, ...]) -> float:
    """What a replacement fetches beside its checkpoint: derived data of Prepare stages."""
    prepared = [s.footprint.samples_per_epoch for s in stages if s.footprint.kind == "prepare"]
    facts = DATA.get(request.workload)
    return sum(prepared) * facts.epoch_bytes_per_sample if facts else 0.0


def _forecast(plan: Plan) -> Estimate | None:
    """Hours and dollars on Spot; None where the run would never end."""
    # The copy keeps the GPU waiting; hash and upload go on beside the training.
    waits = plan.notice.copy + 0.1 if plan.copy_fits_host else plan.notice.save
    interval = interval_seconds(plan) or _auto_interval(plan, waits)
    try:
        return estimate(
            work_seconds=max(plan.work_seconds, 1e-3),
            rate_per_hour=plan.interruptions.rate_per_hour,
            restart_seconds=plan.restart.seconds,
            checkpoint_seconds=waits,
            interval_seconds=interval,
            notice_fits=plan.notice.fits,
            notice_seconds=_idle_seconds(plan),
            wait_seconds=plan.interruptions.wait_seconds,
            usd_per_hour=plan.usd_spot_per_hour,
            trace=plan.request.trace,
        )
    except ValueError:
        return None


def _idle_seconds(plan: Plan) -> float:
    """What of a notice the trainer does not train in."""
    if not plan.request.trains_on_at_notice:
        return plan.notice.budget
    return idle_seconds(
        save_seconds=plan.notice.save,
        step_seconds=plan.notice.step,
        notice_seconds=plan.notice.budget,
    )


def _auto_interval(plan: Plan, waits: float) -> float:
    """What the trainer will choose by itself."""
    return choose_interval(
        cost_seconds=waits,
        durable_seconds=plan.notice.save,
        life_seconds=3600 / max(plan.interruptions.rate_per_hour, NEVER),
        epoch_seconds=plan.main.epoch_seconds or None,
    ).seconds


def interval_seconds(plan: Plan) -> float | None:
    """The checkpoint interval in seconds; None for `auto`."""
    interval = parse_interval(plan.request.checkpoint_interval)
    if interval.unit == "auto":
        return None
    stage = plan.main
    seconds = {"s": 1.0, "steps": stage.step.seconds, "epochs": stage.epoch_seconds}[interval.unit]
    return max(1.0, interval.value * seconds)
