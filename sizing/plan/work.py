"""The work of a run: each stage's time and memory, without interruptions and starts."""

import math
from dataclasses import dataclass, replace

from sizing.models.data_path import epoch_data
from sizing.models.footprints import Footprint, Phase
from sizing.models.host import HostMemory
from sizing.models.memory import GpuMemory, gpu_memory
from sizing.models.step_time import StepEstimate, step_time
from sizing.plan.plan_inputs import PlanInputs

# Bus bandwidth of an all-reduce of 8 GPUs. PCIe (g4dn, g5, g6): from memory. A100, one p4d:
# NVIDIA/nccl#527; H100: the GTC talk in NVIDIA/nccl#1374, also used for later ones.
_PCIE_GB_PER_SECOND = 10.0
_NVLINK_GB_PER_SECOND = {"A100": 230.0, "H100": 480.0, "H200": 480.0, "B200": 480.0, "B300": 480.0}
# Ranks exchange gradients in backward, two thirds of a step, except the last bucket (25 MB).
_BACKWARD, _BUCKET_BYTES = 2 / 3, 25 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePlan:
    """Epochs of a stage whose samples take equal work; `waits`: an epoch, by what it waits for.

    `loader_range`: p10 and p90 of the loader's share of that, in addition to the step's own.
    """

    phase: Phase
    step: StepEstimate
    waits: tuple[tuple[str, float], ...]
    loader_range: tuple[float, float] = (1.0, 1.0)

    @property
    def bound_by(self) -> str:
        """The slowest of GPU, loader and disk, which work side by side."""
        return max(self.waits, key=lambda wait: wait[1])[0]

    @property
    def seconds(self) -> float:
        """Seconds of all its epochs."""
        return self._seconds(self.step.seconds, 1.0)

    @property
    def seconds_low(self) -> float:
        """The seconds if step and loader are as fast as their ranges allow; the slowest decides."""
        return self._seconds(self.step.seconds_low, self.loader_range[0])

    @property
    def seconds_high(self) -> float:
        """The seconds if step and loader are as slow as their ranges allow."""
        return self._seconds(self.step.seconds_high, self.loader_range[1])

    def busy(self, work: float) -> tuple[float, float]:
        """Return the GPU's busy seconds and all seconds if its work takes `work` times as long."""
        (_, all_steps), *others = self.waits
        num_steps = all_steps / self.step.seconds
        works = num_steps * self.step.busy(work)
        launches = num_steps * (self.step.launches + self.step.optimizer)
        longest = max(works, launches, *(seconds for _, seconds in others))
        return self.phase.epochs * works, self.phase.epochs * longest

    def _seconds(self, step_seconds: float, loader: float) -> float:
        shares = {self.step.bound_by: step_seconds / self.step.seconds, "loader CPU": loader}
        return self.phase.epochs * max(
            waited * shares.get(name, 1.0) for name, waited in self.waits
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage: its time by what takes it, and its memory. `step` is the largest step."""

    footprint: Footprint
    step: StepEstimate
    phases: tuple[PhasePlan, ...]
    epoch_seconds: float
    evaluation_seconds: float
    seconds: float
    seconds_low: float
    seconds_high: float
    bound_by: str
    memory: GpuMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedWork:
    """All stages, and the decisive ones."""

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
        """The seconds if every step is as fast as its range allows (p10 of similar runs)."""
        return sum(stage.seconds_low for stage in self.stages)

    @property
    def seconds_high(self) -> float:
        """The seconds if every step is as slow as its range allows (p90 of similar runs)."""
        return sum(stage.seconds_high for stage in self.stages)

    @property
    def busy_percent(self) -> tuple[float, float, float]:
        """The percent of its steps' time that the GPU is busy: p10, p50 and p90 of its work."""
        step = self.main.step
        found = []
        for work in (step.work_low, 1.0, step.work_high):
            parts = [phase.busy(work) for stage in self.stages for phase in stage.phases]
            found.append(100 * sum(busy for busy, _ in parts) / sum(whole for _, whole in parts))
        return found[0], found[1], found[2]

    @property
    def longest_step_seconds(self) -> float:
        """Seconds of the longest optimizer step of any stage, for its largest batch."""
        return max(stage.step.seconds * stage.footprint.largest_over_usual for stage in self.stages)


def plan_work(inputs: PlanInputs, host: HostMemory) -> PlannedWork:
    """Return the work of the request; `host` says how much of the data the page cache holds."""
    return PlannedWork(stages=tuple(_stage(each, inputs, host) for each in inputs.footprints))


def share_gpu(step: StepEstimate, *, runs_per_gpu: int, runs_per_vcpu: float) -> StepEstimate:
    """Return one run's step when several equal runs share a GPU.

    Their work on the GPU adds up. Their launches do not: each run launches from its own CPU, and
    while one of them launches, the GPU works for another.
    """
    return replace(
        step,
        compute=step.compute * runs_per_gpu,
        # The others' optimizers; the run's own follows its own launches.
        traffic=step.traffic * runs_per_gpu + step.optimizer * (runs_per_gpu - 1),
        launches=step.launches * max(1.0, runs_per_vcpu),
    )


def _stage(footprint: Footprint, inputs: PlanInputs, host: HostMemory) -> StagePlan:
    """Return one stage's time, the sum over its phases and evaluations."""
    runs_per_gpu = inputs.request.runs_per_gpu(inputs.instance)
    step = _step(footprint, 1.0, inputs)
    # Forward is a third of a step's work.
    a_sample = (step.compute + step.traffic) / footprint.global_batch / 3 * runs_per_gpu
    images = footprint.validation_samples * footprint.evaluations
    data = _epoch_data(footprint, inputs, host)
    loader_range = inputs.facts.loader_range if inputs.facts else (1.0, 1.0)

    def evaluation(work: float, loader: float) -> float:
        """Return an evaluation's seconds; its samples come through the same loader and disk."""
        shares = {"loader CPU": loader}
        waits = [shares.get(name, 1.0) * seconds for name, seconds in data]
        on_gpu = images * footprint.evaluation_work * a_sample * work
        return max([on_gpu, *(images / footprint.samples_per_epoch * each for each in waits)])

    phases = []
    for phase in footprint.all_phases:
        shared = share_gpu(
            _step(footprint, phase.work, inputs),
            runs_per_gpu=runs_per_gpu,
            runs_per_vcpu=inputs.request.runs / inputs.instance.vcpus,
        )
        waits = ((shared.bound_by, shared.seconds * footprint.steps_per_epoch), *data)
        phases.append(PhasePlan(phase=phase, step=shared, waits=waits, loader_range=loader_range))
    seconds = sum(phase.seconds for phase in phases)
    return StagePlan(
        footprint=footprint,
        step=max((phase.step for phase in phases), key=lambda each: each.seconds),
        phases=tuple(phases),
        epoch_seconds=seconds / footprint.epochs,
        evaluation_seconds=evaluation(1.0, 1.0),
        seconds=seconds + evaluation(1.0, 1.0),
        seconds_low=sum(phase.seconds_low for phase in phases)
        + evaluation(step.work_low, loader_range[0]),
        seconds_high=sum(phase.seconds_high for phase in phases)
        + evaluation(step.work_high, loader_range[1]),
        bound_by=max(phases, key=lambda phase: phase.seconds).bound_by,
        memory=gpu_memory(footprint, inputs.constants),
    )


def _step(footprint: Footprint, work: float, inputs: PlanInputs) -> StepEstimate:
    """Return a step whose samples take `work` times the counted ones', with its exchange."""
    ranks = inputs.request.ranks
    lighter = replace(
        footprint,
        flops_per_sample=footprint.flops_per_sample * work,
        kept_bytes_per_sample=footprint.kept_bytes_per_sample * work,
    )
    step = step_time(lighter, inputs.gpu, inputs.constants, world=ranks)
    if ranks == 1:
        return step
    return replace(step, optimizer=step.optimizer + _exposed_exchange(footprint, inputs, step))


def _exposed_exchange(footprint: Footprint, inputs: PlanInputs, step: StepEstimate) -> float:
    """Return the seconds of the exchange between GPUs that concurrent work does not hide.

    Gradients are exchanged during the last micro-batch's backward; where GPUs share the model, the
    exchange runs during all of each micro-batch.
    """
    a_byte, bytes_each = _exchange_seconds_a_byte(inputs), footprint.exchanged_bytes
    micro_batches = math.ceil(footprint.global_batch / inputs.request.ranks / footprint.micro_batch)
    work = max(step.compute + step.traffic, step.launches) / micro_batches
    if bytes_each is not None:
        last = min(bytes_each, _BUCKET_BYTES)
        return micro_batches * max(bytes_each * a_byte - work, last * a_byte)
    last = min(footprint.gradient_bytes, _BUCKET_BYTES)
    return max(footprint.gradient_bytes * a_byte - _BACKWARD * work, last * a_byte)


def _exchange_seconds_a_byte(inputs: PlanInputs) -> float:
    """Return the seconds of all ranks to add up a byte of each: within a host, then between hosts.

    The GPUs of a host divide the network traffic: each has a part of the sum.
    """
    gpus, hosts = inputs.request.gpus, inputs.request.hosts
    links = (usual for name, usual in _NVLINK_GB_PER_SECOND.items() if name in inputs.gpu.name)
    within = 2 * (gpus - 1) / gpus / (next(links, _PCIE_GB_PER_SECOND) * 1e9)
    if hosts == 1:
        return within
    gbps = inputs.instance.network_baseline_gbps * inputs.constants.exchange_share
    if not gbps:
        raise ValueError(
            f"the baseline network of {inputs.request.size} is not in the catalogue, so hosts of "
            "it cannot be planned; use another size"
        )
    return within + 2 * (hosts - 1) / hosts / (gbps * 125e6)


def _epoch_data(
    footprint: Footprint, inputs: PlanInputs, host: HostMemory
) -> tuple[tuple[str, float], ...]:
    """Return the seconds that an epoch's data takes, by what it waits for."""
    facts = inputs.facts
    if facts is None:
        return ()
    prepares = footprint.kind == "prepare"
    each = facts.dataset_bytes_per_sample if prepares else facts.epoch_bytes_per_sample
    samples = footprint.samples_per_epoch / inputs.request.hosts
    waits = epoch_data(
        samples=samples,
        facts=facts,
        instance=inputs.instance,
        volume=inputs.volume,
        cache_bytes=host.cache_bytes,
        epoch_bytes=samples * each,
        runs=inputs.request.runs,
    )
    return tuple(waits.items())
