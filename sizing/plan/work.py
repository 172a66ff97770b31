"""The work of a run: each stage's time and memory, with no interruption and no start."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sizing.models.data_path import epoch_data
from sizing.models.footprints import Footprint
from sizing.models.host import HostMemory
from sizing.models.memory import GpuMemory, gpu_memory
from sizing.models.step_time import StepTime, step_time
from sizing.plan.inputs import Inputs

# PCIe between GPUs of a g5, and what gradients of all ranks take on it (ring: twice their bytes).
_ALLREDUCE_GB_PER_SECOND = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage: its time by what takes it, and its memory."""

    footprint: Footprint
    step: StepTime
    epoch_seconds: float
    evaluation_seconds: float
    seconds: float
    seconds_low: float
    seconds_high: float
    bound_by: str
    memory: GpuMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """All stages, and the ones that decide."""

    stages: tuple[StagePlan, ...]

    @property
    def main(self) -> StagePlan:
        """The stage that takes longest."""
        return max(self.stages, key=lambda stage: stage.seconds)

    @property
    def memory(self) -> GpuMemory:
        """GPU memory of the stage that needs most."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.need)

    @property
    def seconds(self) -> float:
        """Seconds of training, preparing and evaluating."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def seconds_low(self) -> float:
        """The seconds if every step is as fast as its range allows (p10 of like runs)."""
        return sum(stage.seconds_low for stage in self.stages)

    @property
    def seconds_high(self) -> float:
        """The seconds if every step is as slow as its range allows (p90 of like runs)."""
        return sum(stage.seconds_high for stage in self.stages)

    @property
    def longest_step_seconds(self) -> float:
        """Seconds of the longest optimizer step of any stage: of its largest batch."""
        return max(stage.step.seconds * stage.footprint.largest_over_usual for stage in self.stages)


def plan_work(inputs: Inputs, host: HostMemory) -> Work:
    """Return the work of the request; `host` says how much of the data the page cache holds."""
    return Work(stages=tuple(_stage(each, inputs, host) for each in inputs.footprints))


def share_gpu(step: StepTime, *, runs_per_gpu: int, runs_per_vcpu: float) -> StepTime:
    """Return a step of each of several equal runs on one GPU.

    Their work on the GPU adds up. Their launches do not: each run launches from a CPU of its own,
    and while one of them launches, the GPU works for another.
    """
    return replace(
        step,
        compute=step.compute * runs_per_gpu,
        # The others' optimizers; one's own follows its own launches.
        traffic=step.traffic * runs_per_gpu + step.optimizer * (runs_per_gpu - 1),
        launches=step.launches * max(1.0, runs_per_vcpu),
    )


def _stage(footprint: Footprint, inputs: Inputs, host: HostMemory) -> StagePlan:
    """One stage's time: GPU, loader and disk work side by side, the slowest decides."""
    request, facts, vcpus = inputs.request, inputs.facts, inputs.instance.vcpus
    runs_per_gpu = request.runs_per_gpu(inputs.instance)
    step = step_time(footprint, inputs.gpu, inputs.constants, world=request.gpus)
    if request.gpus > 1:
        exchanged = 2 * footprint.gradient_bytes * (request.gpus - 1) / request.gpus
        step = replace(step, optimizer=step.optimizer + exchanged / 1e9 / _ALLREDUCE_GB_PER_SECOND)
    # Forward is a third of a step's work.
    a_sample = (step.compute + step.traffic) / footprint.global_batch / 3
    evaluation = footprint.validation_samples * a_sample * footprint.evaluations * runs_per_gpu
    step = share_gpu(step, runs_per_gpu=runs_per_gpu, runs_per_vcpu=request.runs / vcpus)
    waits = {step.bound_by: step.seconds * footprint.steps_per_epoch}
    if facts is not None:
        prepares = footprint.kind == "prepare"
        each = facts.dataset_bytes_per_sample if prepares else facts.epoch_bytes_per_sample
        data = epoch_data(
            samples=footprint.samples_per_epoch,
            facts=facts,
            instance=inputs.instance,
            volume=inputs.volume,
            cache_bytes=host.cache_bytes,
            epoch_bytes=footprint.samples_per_epoch * each,
            runs=request.runs,
        )
        waits |= {"loader CPU": data.loader, "disk": data.disk}
    bound_by = max(waits, key=lambda name: waits[name])
    return StagePlan(
        footprint=footprint,
        step=step,
        epoch_seconds=waits[bound_by],
        evaluation_seconds=evaluation,
        seconds=waits[bound_by] * footprint.epochs + evaluation,
        seconds_low=_epoch(waits, step, step.seconds_low) * footprint.epochs
        + evaluation * step.work_low,
        seconds_high=_epoch(waits, step, step.seconds_high) * footprint.epochs
        + evaluation * step.work_high,
        bound_by=bound_by,
        memory=gpu_memory(footprint, inputs.constants),
    )


def _epoch(waits: Mapping[str, float], step: StepTime, step_seconds: float) -> float:
    """Seconds of an epoch, had its steps taken `step_seconds` each: the slowest still decides."""
    ratio = step_seconds / step.seconds
    return max(waited * (ratio if n == step.bound_by else 1) for n, waited in waits.items())
