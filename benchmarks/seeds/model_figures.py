"""Computes the figures of the models that the seed documents name.

ResNet-50 on ImageNet, three language models and a detector: counted, then priced like a workload.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.seeds.figures import fact, spot, usd
from sizing import catalogue
from sizing.catalogue.gpus import find_gpu
from sizing.evidence.memory import needed_mib
from sizing.evidence.truths import Truth, counts, predictable, step_of
from sizing.models.constants import MIB, Constants
from sizing.models.data_path import DATA, GP3_MB_PER_SECOND, epoch_data, volume_rate
from sizing.models.footprints import stages
from sizing.models.host import host_memory
from sizing.models.memory import GpuMemory, gpu_memory
from sizing.models.step_time import StepEstimate, roofline, step_time
from sizing.plan.plan import Plan, make_plan
from sizing.plan.request import Request
from sizing.plan.work import StagePlan

MODELS_FILE = Path(__file__).with_name("models.json")
_SIZE = "g5.2xlarge"
_TOKENS = 256
# With its largest batch, which determines the memory that a run needs.
_DETECTOR = "benchmarks.anchors.detector:dino_padded"
# By its last line of output, a phase has done 90 of its 100 steps.
_SHOWN_STEPS = 90


@cache
def resnet50_hours(size: str) -> float:
    """Return the hours for 90 epochs of ImageNet, limited by GPUs, loader or disk."""
    instance, constants, facts = catalogue.find(size), Constants(), DATA["imagenet"]
    step = roofline(
        replace(step_of(_resnet50()), samples=256, precision="float16"),
        find_gpu(instance.gpu, instance.gpu_memory_mib),
        constants,
        kernels=counts()["resnet50"]["float16"]["kernels_per_step"],
    )
    samples = fact("imagenet_samples")
    data = epoch_data(
        samples=samples,
        facts=facts,
        instance=instance,
        volume=volume_rate(
            instance, max(GP3_MB_PER_SECOND, instance.ebs_baseline_mb_per_second), constants
        ),
        cache_bytes=host_memory(instance, constants).cache_bytes,
        epoch_bytes=samples * facts.epoch_bytes_per_sample,
        runs=1,
    )
    gpu = samples * step.seconds / 256 / instance.num_gpus
    return fact("resnet50_epochs") * max(gpu, *data.values()) / 3600


def _resnet50() -> Truth:
    """Return the published run whose model was counted in half precision and channels last."""
    runs = (t for t in predictable("throughput") if t.model == "resnet50")
    return next(t for t in runs if t.is_on_the_ladder)


# The models of models.json: three language models and a detector.


def _memory(target: str, recipe: str, micro_batch: int) -> GpuMemory:
    found = stages(target, recipe, micro_batch=micro_batch, batch=micro_batch, path=MODELS_FILE)
    return gpu_memory(found[0], Constants())


@cache
def _step(phase: str, batch: str, recipe: str) -> StepEstimate:
    size = int(batch)
    found = stages(_language(phase), recipe, micro_batch=size, batch=size, path=MODELS_FILE)
    instance = catalogue.find(_SIZE)
    return step_time(found[0], find_gpu(instance.gpu, instance.gpu_memory_mib), Constants())


def _language(phase: str) -> str:
    return f"benchmarks.anchors.language:phase{phase}"


def _lm_seconds(phases: str, batch: str, steps: str = "1", recipe: str = "full") -> float:
    """Return the seconds for `steps` steps of each of the phases (such as 123) on an A10G."""
    return sum(int(steps) * _step(phase, batch, recipe).seconds for phase in phases)


def _lm_parameters_m(phase: str) -> float:
    return stages(_language(phase), "full", path=MODELS_FILE)[0].parameters / 1e6


def _lm_active_m(phase: str) -> float:
    """Return the parameters that a token uses: all but six of eight experts in seven layers."""
    width = 832 * (2 if phase == "3" else 1)
    expert = 2 * width * 4 * width + 5 * width
    return _lm_parameters_m(phase) - (0 if phase == "1" else 6 * 7 * expert / 1e6)


def _lm_busy_percent(phase: str, batch: str) -> float:
    step = _step(phase, batch, "full")
    return 100 * min(1.0, (step.compute + step.traffic + step.optimizer) / step.seconds)


def _lm_until_minutes(phase: str, batch: str) -> float:
    """Return the minutes until a phase's last line of output, including earlier phases."""
    before = "".join(str(each) for each in range(1, int(phase)))
    shown = _lm_seconds(phase, batch, str(_SHOWN_STEPS))
    return (_lm_seconds(before, batch, "100") + shown) / 60


# Figures of the project's own recipe for the same three phases: bfloat16, batch 16, and memory
# savers that let the last phase fit.


@cache
def _growth() -> Plan:
    return make_plan(Request(workload="growth", recipe="full", size=_SIZE))


def _growth_stage(name: str) -> StagePlan:
    return next(stage for stage in _growth().work.stages if stage.footprint.stage == name)


def _growth_minutes(steps: str, *names: str) -> float:
    """Return the minutes for `steps` steps of each of the phases, by default all."""
    stages = [_growth_stage(name) for name in names] or _growth().work.stages
    return sum(int(steps) * stage.step.seconds for stage in stages) / 60


def _lm_hours(batch: str, steps: str) -> float:
    return _lm_seconds("123", batch, steps) / 3600


@cache
def _dino(size: str, epochs: str) -> Plan:
    """Return the workload's own plan for CubiCasa5K, with two images on each GPU."""
    name = size.removeprefix("ml.")
    gpus = catalogue.find(name).num_gpus
    asked = Request(workload="detection", recipe="full", size=name, gpus=gpus, batch=2 * gpus)
    return make_plan(replace(asked, epochs=float(epochs)))


def _dino_hours(size: str, epochs: str) -> float:
    return _dino(size, epochs).work.seconds / 3600


def _dino_range(size: str, epochs: str) -> str:
    work = _dino(size, epochs).work
    return f"{work.seconds_low / 3600:.3g} to {work.seconds_high / 3600:.3g} h"


def _dino_memory_gb(batch: str, part: str) -> float:
    memory = _memory(_DETECTOR, "full", int(batch))
    return float(getattr(memory, part)) * MIB / 1e9


def _dino_free_percent() -> float:
    there = catalogue.find(_SIZE).gpu_memory_mib
    return 100 * (1 - _memory(_DETECTOR, "full", 2).need / there)


def _detector_saves(change: str) -> str:
    """Return how much memory a change of the detector saves at batch 2."""
    changed, whole = (
        _memory(f"benchmarks.anchors.detector:{each}", "full", 2).need
        for each in (change, "queries_300")
    )
    return f"saves {100 * (1 - changed / whole):.2g} %"


MODEL_FIGURES: Mapping[str, Callable[..., float | str]] = {
    "resnet50_hours": resnet50_hours,
    "resnet50_days": lambda size: resnet50_hours(size) / 24,
    "resnet50_usd": lambda size: resnet50_hours(size) * usd(size),
    "resnet50_spot_usd": lambda size: resnet50_hours(size) * spot(size),
    "resnet50_cheapest": lambda *sizes: min(sizes, key=lambda s: resnet50_hours(s) * usd(s)),
    "resnet50_cheapest_spot": lambda *sizes: min(sizes, key=lambda s: resnet50_hours(s) * spot(s)),
    "resnet50_memory_gb": lambda batch: (
        needed_mib(_resnet50(), int(batch), Constants()) * MIB / 1e9
    ),
    "imagenet_gb": lambda: (
        fact("imagenet_samples") * DATA["imagenet"].dataset_bytes_per_sample / 1e9
    ),
    "lm_seconds": _lm_seconds,
    "lm_minutes": lambda *how: _lm_seconds(*how) / 60,
    "lm_tokens": lambda phase, batch: int(batch) * _TOKENS / _lm_seconds(phase, batch),
    "lm_parameters_m": _lm_parameters_m,
    "lm_active_m": _lm_active_m,
    "lm_active_ratio": lambda one, other: _lm_active_m(one) / _lm_active_m(other),
    "lm_until": _lm_until_minutes,
    "lm_memory_gb": lambda phase, batch, part="need": (
        getattr(_memory(_language(phase), "full", int(batch)), part) * MIB / 1e9
    ),
    # Four-byte parameters (1 copy), gradients (1) or AdamW's states (2).
    "lm_state_gb": lambda phase, copies: _lm_parameters_m(phase) * 4e6 * int(copies) / 1e9,
    "lm_busy_percent": _lm_busy_percent,
    "lm_hours": _lm_hours,
    "lm_usd": lambda batch, steps: _lm_hours(batch, steps) * usd(_SIZE),
    "lm_spot_usd": lambda batch, steps: _lm_hours(batch, steps) * spot(_SIZE),
    "lm_half_faster_percent": lambda: (
        100 * (1 - _lm_seconds("123", "16", "1", "bfloat16") / _lm_seconds("123", "16"))
    ),
    "lm_half_minutes": lambda: _lm_seconds("123", "16", "100", "bfloat16") / 60,
    "growth_memory_gb": lambda name: _growth_stage(name).memory.need * MIB / 1e9,
    "growth_minutes": _growth_minutes,
    "growth_tokens": lambda name: 16 * _TOKENS / _growth_stage(name).step.seconds,
    "growth_usd": lambda steps: _growth_minutes(steps) / 60 * usd(_SIZE),
    "growth_spot_usd": lambda steps: _growth_minutes(steps) / 60 * spot(_SIZE),
    "dino_hours": _dino_hours,
    "dino_range": _dino_range,
    "dino_usd": lambda size, epochs: _dino_hours(size, epochs) * fact(size),
    "dino_memory_gb": _dino_memory_gb,
    "dino_memory_share": lambda: _dino_memory_gb("1", "need") / _dino_memory_gb("2", "need"),
    "dino_free_percent": _dino_free_percent,
    "detector_saves": _detector_saves,
}
