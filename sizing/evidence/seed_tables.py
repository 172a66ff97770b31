"""The seed documents' tables again, with computed figures beside the claimed ones.

seed_claims.csv has the claims and how each figure is computed here: the column `ours` names a
function, which uses the catalogue, the models and the footprints.
"""

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sizing import catalogue
from sizing.catalogue.gpus import find_gpu
from sizing.evidence import accuracy
from sizing.evidence.accuracy import counts
from sizing.models.constants import GIB, MIB, Constants
from sizing.models.data_path import DATA, GP3_MB_PER_SECOND, epoch_data, volume_rate
from sizing.models.host import host_memory
from sizing.models.step_time import Step, roofline
from sizing.plan.plan import make_plan
from sizing.plan.request import Request

CLAIMS_FILE = Path(__file__).with_name("seed_claims.csv")
SEEDS = ("000", "002", "003")
IMAGENET_SAMPLES = 1_281_167
RESNET50_EPOCHS = 90
# SageMaker training, us-east-1, from third-party tables of 2026-07; AWS publishes prices by API.
SAGEMAKER_USD = {
    "ml.g5.xlarge": 1.408,
    "ml.g5.2xlarge": 1.515,
    "ml.p3.2xlarge": 3.825,
    "ml.p4d.24xlarge": 37.69,
}
# DN-Deformable-DETR-R50, 12 epochs of COCO in 55 h on one A100 (detrex issue 120); and CubiCasa5K.
DETR_IMAGES_PER_SECOND, DETR_GPU = 7.2, "NVIDIA A100"
CUBICASA_IMAGES = 2_935


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One figure of a seed document beside ours."""

    seed: str
    table: str
    row: str
    what: str
    claimed: float
    unit: str
    ours: float
    why: str

    @property
    def difference(self) -> str:
        """Claimed relative to ours: a share, a factor where it is large, or `same`."""
        if math.isclose(self.claimed, self.ours, rel_tol=0.015, abs_tol=0.006):
            return "same"
        if not self.ours or not self.claimed:
            return "left out"
        ratio = self.claimed / self.ours
        if ratio >= 2 or ratio <= 0.5:
            return f"{ratio:.2g} x"
        return f"{ratio - 1:+.0%}"


def claims(seed: str) -> list[Claim]:
    """Return every figure of a seed document's tables."""
    if seed not in SEEDS:
        raise ValueError(f"there are no tables {seed!r}; known are {', '.join(SEEDS)}")
    with CLAIMS_FILE.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["seed"] == seed]
    return [
        Claim(
            seed=seed,
            table=row["table"],
            row=row["row"],
            what=row["what"],
            claimed=float(row["claimed"]),
            unit=row["unit"],
            ours=_ours(row["ours"]),
            why=row["why"],
        )
        for row in rows
    ]


def _ours(text: str) -> float:
    name, _, rest = text.partition(":")
    return float(_HOW[name](*rest.split(",")))


def _gpu_memory_each(size: str) -> float:
    return catalogue.find(size).gpu_memory_mib / 1024


def _gpu_memory(size: str) -> float:
    return _gpu_memory_each(size) * catalogue.find(size).num_gpus


def _product(*factors: str) -> float:
    return math.prod(float(factor) for factor in factors) / 1e6


def _times(text: str, divisor: float) -> float:
    one, other = text.split("*")
    return float(one) * float(other) / divisor


def _host_gib(runs: str, num_bytes: str) -> float:
    """Return decimal GB, as the document counts, of runs that each load and hold the dataset."""
    memory = host_memory(
        catalogue.find("g5.2xlarge"),
        Constants(),
        runs=int(runs),
        data_bytes_each=float(num_bytes),
        load_copies=2,
    )
    return memory.need * GIB / 1e9


def _plan_memory_mb(workload: str, recipe: str, size: str) -> float:
    plan = make_plan(Request(workload=workload, recipe=recipe, size=size))
    return plan.work.memory.need * MIB / 1e6


def _spot_saving(size: str) -> float:
    share = catalogue.spot_price(size).usd_per_hour / catalogue.hourly_price(size).usd_per_hour
    return 100 * (1 - share)


@cache
def resnet50_hours(size: str) -> float:
    """Return the hours of 90 epochs of ImageNet: the slowest of GPUs, loader and disk."""
    instance, constants, facts = catalogue.find(size), Constants(), DATA["imagenet"]
    count = counts()["resnet50"]
    step = roofline(
        Step(
            samples=256,
            flops_per_sample=count["flops_per_sample"],
            kept_bytes_per_sample=count["float16"]["kept_bytes_per_sample"],
            optimizer_traffic_bytes=count["parameters"] * accuracy.OPTIMIZER_BYTES["sgd"][0],
            precision="float16",
            convolution_share=count["convolution_share"],
        ),
        find_gpu(instance.gpu, instance.gpu_memory_mib),
        constants,
        kernels=count["float16"]["kernels_per_step"],
    )
    data = epoch_data(
        samples=IMAGENET_SAMPLES,
        facts=facts,
        instance=instance,
        volume=volume_rate(
            instance, max(GP3_MB_PER_SECOND, instance.ebs_baseline_mb_per_second), constants
        ),
        cache_bytes=host_memory(instance, constants).cache_bytes,
        epoch_bytes=IMAGENET_SAMPLES * facts.epoch_bytes_per_sample,
        runs=1,
    )
    gpu = IMAGENET_SAMPLES * step.seconds / 256 / instance.num_gpus
    return RESNET50_EPOCHS * max(gpu, data.loader, data.disk) / 3600


def dino_hours(size: str, epochs: str) -> float:
    """Return the hours of CubiCasa5K on all GPUs: a published run scaled by memory bandwidth."""
    instance = catalogue.find(size.removeprefix("ml."))
    gpu = find_gpu(instance.gpu, instance.gpu_memory_mib)
    share = gpu.bandwidth_gb_per_second / find_gpu(DETR_GPU).bandwidth_gb_per_second
    rate = DETR_IMAGES_PER_SECOND * share * instance.num_gpus
    return int(epochs) * CUBICASA_IMAGES / rate / 3600


def _usd(size: str) -> float:
    return catalogue.hourly_price(size).usd_per_hour


_HOW: Mapping[str, Callable[..., float]] = {
    "number": float,
    "product": _product,
    "minutes": lambda text: _times(text, 60),
    "megabytes": lambda text: _times(text, 1e9),
    "price": _usd,
    "spot_price": lambda size: catalogue.spot_price(size).usd_per_hour,
    "spot_saving": _spot_saving,
    "yearly": lambda size, hours, weeks: _usd(size) * float(hours) * float(weeks),
    "gpus": lambda size: catalogue.find(size).num_gpus,
    "gpu_memory": _gpu_memory,
    "gpu_memory_each": _gpu_memory_each,
    "vcpus": lambda size: catalogue.find(size).vcpus,
    "memory": lambda size: catalogue.find(size).memory_gib,
    "nvme": lambda size: catalogue.find(size).instance_store_gb,
    "network_baseline": lambda size: catalogue.find(size).network_baseline_gbps,
    "plan_memory_mb": _plan_memory_mb,
    "host_gib": _host_gib,
    "resnet50_hours": resnet50_hours,
    "resnet50_days": lambda size: resnet50_hours(size) / 24,
    "resnet50_usd": lambda size: resnet50_hours(size) * _usd(size),
    "resnet50_spot_usd": lambda size: (
        resnet50_hours(size) * catalogue.spot_price(size).usd_per_hour
    ),
    "sagemaker_price": lambda size: SAGEMAKER_USD[size],
    "dino_hours": dino_hours,
    "dino_usd": lambda size, epochs: dino_hours(size, epochs) * SAGEMAKER_USD[size],
}
