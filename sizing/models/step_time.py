"""Seconds of a training step on a GPU: a roofline whose two roofs are added, not overlapped.

step = n * max(FLOPs / peak * factor + passes * kept bytes / bandwidth, kernels * launch)
       + optimizer bytes / bandwidth, for n micro-batches

FLOPs and kept bytes are counted, peak and bandwidth are in sizing/catalogue/gpus.csv, the two
factors are fitted to published runs. Adding the roofs fits those better than taking their maximum:
an eager step computes and then moves data, kernel by kernel.
"""

import math
from dataclasses import dataclass

from sizing.catalogue.gpus import Gpu
from sizing.models.constants import Constants
from sizing.models.footprints import Footprint

# Frozen forward passes keep nothing for backward: each layer writes and reads its output once.
_FORWARD_PASSES = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by what they are spent on."""

    compute: float
    traffic: float
    optimizer: float
    launches: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step: launches hide behind the GPU's work, or it behind them."""
        return max(self.compute + self.traffic, self.launches) + self.optimizer

    @property
    def bound_by(self) -> str:
        """What takes most of the step."""
        if self.launches > self.compute + self.traffic:
            return "kernel launches"
        parts = {
            "GPU compute": self.compute,
            "GPU memory bandwidth": self.traffic,
            "optimizer (GPU memory bandwidth)": self.optimizer,
        }
        return max(parts, key=lambda name: parts[name])


def matrix_factor(precision: str, constants: Constants) -> float:
    """Return how many times longer than at peak the matrix products of `precision` take."""
    if precision in ("float16", "bfloat16"):
        return constants.half_time_factor
    return constants.float32_time_factor


def roofline(
    *,
    samples: float,
    flops_per_sample: float,
    kept_bytes_per_sample: float,
    optimizer_traffic_bytes: float,
    launches_seconds: float,
    precision: str,
    gpu: Gpu,
    constants: Constants,
) -> StepTime:
    """Return the time of a step of `samples` samples on `gpu`."""
    bandwidth = gpu.bandwidth_gb_per_second * 1e9
    factor = matrix_factor(precision, constants) * constants.time_factor
    return StepTime(
        compute=samples * flops_per_sample / gpu.peak_flops(precision) * factor,
        traffic=samples
        * kept_bytes_per_sample
        * constants.traffic_passes
        / bandwidth
        * constants.time_factor,
        optimizer=optimizer_traffic_bytes / bandwidth * constants.time_factor,
        launches=launches_seconds * constants.time_factor * constants.launch_factor,
    )


def step_time(footprint: Footprint, gpu: Gpu, constants: Constants, *, world: int = 1) -> StepTime:
    """Return the time of a stage's optimizer step, its global batch shared by `world` GPUs."""
    prepares = footprint.kind == "prepare"
    samples = footprint.micro_batch if prepares else footprint.global_batch / world
    micro_batches = math.ceil(samples / footprint.micro_batch)
    launches = constants.least_step_seconds
    if footprint.kernels_per_step is not None:
        launches = footprint.kernels_per_step * constants.seconds_per_kernel
    elif prepares:
        launches /= 3  # forward only
    # Reads gradients; reads and writes parameters and state.
    state = 2 * (footprint.parameter_bytes + footprint.optimizer_bytes) + footprint.gradient_bytes
    kept = footprint.kept_bytes_per_sample
    if prepares:
        kept = footprint.activation_bytes * _FORWARD_PASSES / constants.traffic_passes
    return roofline(
        samples=samples,
        flops_per_sample=footprint.flops_per_sample,
        kept_bytes_per_sample=kept,
        optimizer_traffic_bytes=0 if prepares else state,
        launches_seconds=launches * micro_batches,
        precision=footprint.precision,
        gpu=gpu,
        constants=constants,
    )
