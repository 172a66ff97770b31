"""Computes our figures for the seed documents' claims: sizes, dollars, endpoints.

Figures that do not follow from the catalogue, the models or counted footprints are published facts,
which are in facts.csv with their sources.
"""

import csv
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from sizing import catalogue
from sizing.catalogue.gpus import find_gpu
from sizing.models.constants import GIB, MIB, Constants
from sizing.models.data_path import DATA
from sizing.models.host import host_memory
from sizing.models.serving import Service, published, serve_online
from sizing.plan.plan import Plan, make_plan
from sizing.plan.request import Request
from sizing.plan.work import StagePlan
from sizing.select.families import cost_level
from sizing.spot.interruptions import ADVISOR_SHARES

FACTS_FILE = Path(__file__).with_name("facts.csv")
_SIZE = "g5.2xlarge"


@cache
def _facts() -> Mapping[str, float]:
    with FACTS_FILE.open(newline="", encoding="utf-8") as lines:
        return {row["name"]: float(row["value"]) for row in csv.DictReader(lines)}


def fact(name: str) -> float:
    """Return a published figure from facts.csv."""
    return _facts()[name]


# Sizes, prices and budgets.


def usd(size: str) -> float:
    """Return the list price per hour."""
    return catalogue.hourly_price(size).usd_per_hour


def spot(size: str) -> float:
    """Return the most expensive zone's Spot price per hour."""
    return catalogue.spot_price(size).usd_per_hour


def _memory_each(size: str) -> float:
    return catalogue.find(size).gpu_memory_mib / 1024


def _ratio(field: str, one: str, other: str) -> float:
    return float(getattr(catalogue.find(one), field) / getattr(catalogue.find(other), field))


def _use(size: str, hours: str, weeks: str) -> float:
    return usd(size) * float(hours) * float(weeks)


def _spot_use(size: str, hours: str, weeks: str) -> float:
    return spot(size) * float(hours) * float(weeks)


# The trajectory workload, counted.


@cache
def _plan(size: str, runs: int = 1) -> Plan:
    return make_plan(Request(workload="trajectory", recipe="reference", size=size, runs=runs))


def _trained() -> StagePlan:
    """Return the document's stage: a transformer over a frozen ResNet's features."""
    return _plan(_SIZE).work.main


def _free_bytes(held: float) -> float:
    """Return the GPU's free bytes after context, fragments and `held` bytes."""
    plan = _plan(_SIZE)
    there = (plan.inputs.instance.gpu_memory_mib - plan.work.memory.context) * MIB
    return there / (1 + plan.inputs.constants.fragmentation_share) - held


def _largest_batch() -> float:
    """Return the largest micro-batch on the GPU, from the bytes that each sample adds."""
    footprint = _trained().footprint
    return footprint.micro_batch + _free_bytes(footprint.peak_bytes) // _bytes_of_a_sample()


def _bytes_of_a_sample() -> float:
    """Return each micro-batch sample's share of the peak."""
    footprint = _trained().footprint
    return footprint.activation_bytes / footprint.micro_batch


def _cached_samples(size: str) -> float:
    """Return how many clips' features a size's page cache holds."""
    return _plan(size).host.cache_bytes / DATA["trajectory"].epoch_bytes_per_sample


def _most_runs(size: str) -> float:
    host = _plan(size).host
    return host.usable // host.processes


def _host_gb(runs: str, num_bytes: str) -> float:
    """Return the decimal GB (as in the document) of runs that each load and hold the dataset."""
    instance = catalogue.find(_SIZE)
    each = float(num_bytes)
    memory = host_memory(instance, Constants(), runs=int(runs), data_bytes_each=each)
    return memory.need * GIB / 1e9


# An endpoint (seed 004).


def _served(size: str) -> Service:
    """Serve BERT at a thousand requests a minute within 200 ms."""
    throughput = next(each for each in published("bert-base", "online") if each.size == size)
    found = serve_online(
        throughput, demand_per_second=1000 / 60, latency_goal_ms=200, usd_per_hour=usd(size)
    )
    assert found is not None
    return found


def _order(one: float, other: float) -> str:
    return "lower" if one < other else "higher"


def _memory_order(one: str, other: str) -> str:
    difference = catalogue.find(one).gpu_memory_mib - catalogue.find(other).gpu_memory_mib
    return "the same" if not difference else "more" if difference > 0 else "less"


FIGURES: Mapping[str, Callable[..., float | str]] = {
    "fact": fact,
    "arithmetic": lambda *factors: math.prod(float(factor) for factor in factors),
    "sum": lambda *parts: sum(float(part) for part in parts),
    "quotient": lambda one, other: float(one) / float(other),
    "first_loss": lambda classes, width: math.log(float(classes)) + float(width) * 0.02**2 / 2,
    "price": usd,
    "price_more": lambda one, other: usd(other) - usd(one),
    "price_more_percent": lambda one, other: 100 * (usd(other) / usd(one) - 1),
    "price_less_percent": lambda one, other: 100 * (1 - usd(other) / usd(one)),
    "price_ratio": lambda one, other: usd(one) / usd(other),
    "spot_price": spot,
    "spot_saving": lambda size: 100 * (1 - spot(size) / usd(size)),
    "use": _use,
    "use_more": lambda one, other, *time: _use(other, *time) - _use(one, *time),
    "spot_use": _spot_use,
    "spot_use_saved": lambda size, *time: _use(size, *time) - _spot_use(size, *time),
    "interrupted_percent": lambda size: 100 * sum(ADVISOR_SHARES[size]) / 2,
    "gpus": lambda size: catalogue.find(size).num_gpus,
    "gpu_memory": lambda size: _memory_each(size) * catalogue.find(size).num_gpus,
    "gpu_memory_each": _memory_each,
    "gpu_memory_mib": lambda size: catalogue.find(size).gpu_memory_mib,
    "vcpus": lambda size: catalogue.find(size).vcpus,
    "memory": lambda size: catalogue.find(size).memory_gib,
    "times_memory": lambda one, other: _ratio("memory_gib", one, other),
    "times_vcpus": lambda one, other: _ratio("vcpus", one, other),
    "network_baseline": lambda size: catalogue.find(size).network_baseline_gbps,
    "bandwidth": lambda gpu: find_gpu(gpu).bandwidth_gb_per_second,
    "peak": lambda gpu, precision: find_gpu(gpu).peak_flops(precision) / 1e12,
    "tensor_core_generation": lambda size: float(
        catalogue.find(size).tensor_core_generation_from_memory.rstrip("rdth")
    ),
    "cores": lambda size: catalogue.find(size).vcpus / 2,
    "cost_level": cost_level,
    "served_ms": lambda size: _served(size).latency_ms,
    "served_order": lambda one, other: _order(
        _served(one).usd_per_million, _served(other).usd_per_million
    ),
    "memory_order": _memory_order,
    "runs_cuda": lambda family: "no" if catalogue.families()[family].kind == "chip" else "yes",
    "cheaper_than": lambda one, other: _order(usd(other), usd(one)),
    "plan_memory_mb": lambda: _plan(_SIZE).work.memory.need * MIB / 1e6,
    "plan_memory_percent": lambda: (
        100 * _plan(_SIZE).work.memory.need / catalogue.find(_SIZE).gpu_memory_mib
    ),
    "plan_free_percent": lambda: (
        100 * (1 - _plan(_SIZE).work.memory.need / catalogue.find(_SIZE).gpu_memory_mib)
    ),
    "plan_free_gb": lambda: (
        (catalogue.find(_SIZE).gpu_memory_mib - _plan(_SIZE).work.memory.need) * MIB / 1e9
    ),
    "memory_part_mb": lambda part: getattr(_trained().memory, part) * MIB / 1e6,
    "gradients_mb": lambda: _trained().footprint.gradient_bytes / 1e6,
    "notice_minutes": lambda: Constants().notice_seconds / 60,
    "each_sample_mb": lambda: _bytes_of_a_sample() / 1e6,
    "parameters_mb": lambda: _plan(_SIZE).work.main.footprint.parameter_bytes / 1e6,
    "gradients_of_parameters": lambda: (
        _plan(_SIZE).work.main.footprint.gradient_bytes
        / (4 * _plan(_SIZE).work.main.footprint.parameters)
    ),
    "largest_batch": _largest_batch,
    # The four-byte parameters that fill the GPU with their gradients and AdamW's two states.
    "largest_model_mb": lambda: _free_bytes(_trained().memory.activations * MIB) / 4 / 1e6,
    "cached_samples": _cached_samples,
    "most_runs": _most_runs,
    "host_gb": _host_gb,
    "lost_minutes": lambda epoch_seconds: 2 * fact(epoch_seconds) / 60,
    "usd_of_minutes": lambda minutes, size: float(minutes) / 60 * usd(size),
    "minutes_of_epochs": lambda epochs, each: float(epochs) * fact(each) / 60,
}
