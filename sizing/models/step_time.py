"""Seconds of a training step on a GPU: a roofline whose two roofs are added, with a range.

work = (FLOPs / peak * factor + passes * kept bytes / bandwidth) * exp(sum of exponent * feature)
step = n * max(work, kernels * launch) + optimizer bytes / bandwidth, for n micro-batches

FLOPs and bytes are counted, peaks are in sizing/catalogue/gpus.csv, the rest is fitted to published
runs (sizing/models/fitted.json). The range of the work is p10 to p90 of similar runs, that of the
launches is from published hosts like the GPU's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sizing.catalogue.gpus import Gpu
from sizing.models.constants import Constants
from sizing.models.fitted import ErrorRange, Fitted, Launch, fitted
from sizing.models.footprints import Footprint

# Frozen forward passes keep nothing for backward: each layer writes and reads its output once.
_FORWARD_PASSES = 2.0
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The counted computation and traffic of an optimizer step over `samples` samples."""

    samples: float
    flops_per_sample: float
    kept_bytes_per_sample: float
    optimizer_traffic_bytes: float
    precision: str
    convolution_share: float = 0.0
    grouped_share: float = 0.0
    channels_last: bool = True

    @property
    def kind(self) -> str:
        """The kind of similar runs, whose errors are alike."""
        if self.grouped_share >= 0.1:
            return "grouped convolutions"
        return "convolutions" if self.convolution_share >= 0.5 else "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """Seconds of one optimizer step by what they are spent on, with ranges for two of them.

    `work_low` and `work_high` multiply compute and traffic, `launches_low` and `launches_high` the
    launches; `basis` says which published runs the range is from.
    """

    compute: float
    traffic: float
    optimizer: float
    launches: float
    work_low: float = 1.0
    work_high: float = 1.0
    launches_low: float = 1.0
    launches_high: float = 1.0
    basis: str = ""

    def _seconds(self, work: float, launches: float) -> float:
        gpu = (self.compute + self.traffic) * work
        return max(gpu, self.launches * launches) + self.optimizer

    def busy(self, work: float) -> float:
        """Return the seconds that the GPU is busy if its work takes `work` times as long."""
        return (self.compute + self.traffic) * work + self.optimizer

    @property
    def seconds(self) -> float:
        """Seconds of the step: launches overlap with the GPU's work, and the longer one counts."""
        return self._seconds(1.0, 1.0)

    @property
    def seconds_low(self) -> float:
        """The step's seconds if work and launches are as fast as similar runs' p10."""
        return self._seconds(self.work_low, self.launches_low)

    @property
    def seconds_high(self) -> float:
        """The step's seconds if work and launches are as slow as similar runs' p90."""
        return self._seconds(self.work_high, self.launches_high)

    @property
    def bound_by(self) -> str:
        """The part that takes most of the step."""
        if self.launches > self.compute + self.traffic:
            return "kernel launches"
        parts = {
            "GPU compute": self.compute,
            "GPU memory bandwidth": self.traffic,
            "optimizer (GPU memory bandwidth)": self.optimizer,
        }
        return max(parts, key=lambda name: parts[name])


def features(step: Step, gpu: Gpu) -> Mapping[str, float]:
    """Return what makes steps of equal FLOPs and bytes differ in speed, each from 0 to about 1.

    cuDNN's half kernels prefer channels last; its kernels for groups do not.
    """
    half = step.precision in _HALF
    bandwidth = math.log(gpu.bandwidth_gb_per_second / 1000)
    return {
        "convolution": step.convolution_share,
        "convolution_by_log_bandwidth": step.convolution_share * bandwidth,
        "convolution_in_half_channels_first": step.convolution_share
        * (half and not step.channels_last),
        "groups_channels_last": step.grouped_share * step.channels_last,
    }


def time_factor_of(precision: str) -> str:
    """Return the name of the time factor of a precision in `Fitted.time_factors`."""
    return "half" if precision in _HALF else precision


def roofline(
    step: Step,
    gpu: Gpu,
    constants: Constants,
    *,
    kernels: float = 0.0,
    launch: Launch | None = None,
    found: Fitted | None = None,
) -> StepEstimate:
    """Return the time of a step that starts `kernels` kernels, each as slow as `launch`."""
    found, scale = found or fitted(), constants.time_factor
    bandwidth = gpu.bandwidth_gb_per_second * 1e9
    factor = found.time_factors[time_factor_of(step.precision)]
    values = features(step, gpu)
    slower = scale * math.exp(sum(found.exponents[name] * value for name, value in values.items()))
    interval, basis = found.intervals[step.kind], found.basis(gpu.name)
    launch = launch or launch_of(gpu, found)
    if scale != 1:
        interval, basis = ErrorRange(low=1.0, high=1.0, runs=1), "this workload, run on this GPU"
    if scale != 1 or constants.launch_factor != 1:
        launch = Launch(
            low=launch.likely, likely=launch.likely, high=launch.likely, hosts="its own"
        )
    return StepEstimate(
        compute=step.samples
        * step.flops_per_sample
        / gpu.peak_flops(step.precision)
        * factor
        * slower,
        traffic=step.samples
        * step.kept_bytes_per_sample
        / bandwidth
        * found.traffic_passes
        * slower,
        optimizer=step.optimizer_traffic_bytes / bandwidth * scale,
        launches=kernels * launch.likely * scale * constants.launch_factor,
        work_low=interval.low,
        work_high=interval.high,
        launches_low=launch.low / launch.likely,
        launches_high=launch.high / launch.likely,
        basis=basis,
    )


def launch_of(gpu: Gpu, found: Fitted | None = None) -> Launch:
    """Return the seconds of a kernel launch on the hosts that EC2 gives this GPU."""
    launches = (found or fitted()).launches
    return launches.get(gpu.name) or launches["other"]


def step_time(
    footprint: Footprint, gpu: Gpu, constants: Constants, *, world: int = 1
) -> StepEstimate:
    """Return the time of a stage's optimizer step, its global batch shared by `world` GPUs."""
    prepares = footprint.kind == "prepare"
    samples = footprint.micro_batch if prepares else footprint.global_batch / world
    # Reads gradients; reads and writes state and the trained parameters, as large as their
    # gradients. If  gradients are freed as soon as they are used, all parameters are trained.
    trained = footprint.gradient_bytes or footprint.parameter_bytes
    state = 2 * (trained + footprint.optimizer_bytes) + footprint.gradient_bytes
    kept = footprint.kept_bytes_per_sample
    if prepares:
        kept = footprint.activation_bytes * _FORWARD_PASSES / fitted().traffic_passes
    counted = Step(
        samples=samples,
        flops_per_sample=footprint.flops_per_sample,
        kept_bytes_per_sample=kept,
        optimizer_traffic_bytes=0 if prepares else state,
        precision=footprint.precision,
        convolution_share=footprint.convolution_share,
        grouped_share=footprint.grouped_share,
        channels_last=footprint.channels_last,
    )
    kernels = footprint.kernels * math.ceil(samples / footprint.micro_batch)
    return roofline(counted, gpu, constants, kernels=kernels)
