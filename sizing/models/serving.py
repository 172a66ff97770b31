"""The cost of serving a model at the actual demand: instances, waits, dollars per million.

Throughputs are published with their source, scaled (and marked as such), or the user's own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from sizing import catalogue
from sizing.catalogue import InstanceType
from sizing.catalogue.gpus import find_gpu
from sizing.csv_rows import read_rows

THROUGHPUTS_FILE = Path(__file__).with_name("throughputs.csv")
# The share of requests that must meet the latency goal.
IN_TIME = 0.95
MAX_INSTANCES = 10_000
# Turbo clock of all cores, GHz: c5 3.6, m5 3.1 (EC2's instance pages, from memory).
_CLOCKS = {("c5", "m5"): 3.1 / 3.6}
_SERVING_GPUS = ("g5", "g6", "g6e")
Use = Literal["online", "batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Inferences per second of one instance, and the latency of each."""

    size: str
    per_second: float
    latency_ms: float | None
    basis: Literal["measured", "derived", "scaled", "given"]
    note: str
    source: str
    model: str = ""
    use: frozenset[str] = frozenset()

    @property
    def service_ms(self) -> float:
        """Milliseconds of one inference; if not published, the time of one request at a time."""
        return 1000 / self.per_second if self.latency_ms is None else self.latency_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A number of instances that meets the demand within the latency goal."""

    instances: int
    utilization: float
    latency_ms: float
    usd_per_hour: float
    usd_per_million: float


@cache
def _published() -> list[Throughput]:
    return read_rows(THROUGHPUTS_FILE, Throughput)


@cache
def published(model: str, use: Use) -> tuple[Throughput, ...]:
    """Return published throughputs of a model, and those scaled to similar sizes."""
    found = [each for each in _published() if each.model == model and use in each.use]
    known = {each.size for each in found}
    return (*found, *(each for each in _scaled(found) if each.size not in known))


@cache
def models() -> tuple[str, ...]:
    """Return the models with published throughputs."""
    return tuple(sorted({each.model for each in _published()}))


def _scaled(found: Sequence[Throughput]) -> list[Throughput]:
    """Scale to sizes that are similar to a published one: modelled, not measured."""
    others = catalogue.instances().values()
    return [
        scaled
        for other in others
        if (scaled := _on_cpu(found, other) if other.kind == "cpu" else _on_gpu(found, other))
    ]


def _on_cpu(found: Sequence[Throughput], other: InstanceType) -> Throughput | None:
    """Scale by vCPUs and clock, to half to four times the vCPUs: large sizes scale badly."""
    for base in found:
        instance = catalogue.find(base.size)
        if instance.kind != "cpu" or instance.vcpus > 8 or instance == other:
            continue
        same = instance.family == other.family
        clock = 1.0 if same else _CLOCKS.get((instance.family, other.family), 0.0)
        share = other.vcpus / instance.vcpus
        if clock and 0.5 <= share <= 4:
            return _times(base, other, share * clock, "vCPUs" if same else "vCPUs and clock")
    return None


def _on_gpu(found: Sequence[Throughput], other: InstanceType) -> Throughput | None:
    """Scale to a single GPU: from the same GPU if published, else the lowest of all others."""
    if other.family not in _SERVING_GPUS or other.num_gpus != 1:
        return None
    best: dict[str, Throughput] = {}
    for base in found:
        instance = catalogue.find(base.size)
        known = best.get(instance.gpu, base)
        if instance.num_gpus == 1 and (base is known or base.per_second > known.per_second):
            best[instance.gpu] = base
    if other.gpu in best:
        return _times(best[other.gpu], other, 1.0, "the same GPU")
    scaled = [_by_roofs(base, other) for base in best.values()]
    return min(scaled, key=lambda each: each.per_second, default=None)


def _by_roofs(base: Throughput, other: InstanceType) -> Throughput:
    """Scale by the lower of tensor rate and bandwidth: more of only one is worth nothing."""
    instance = catalogue.find(base.size)
    one, two = (find_gpu(each.gpu, each.gpu_memory_mib) for each in (instance, other))
    return _times(base, other, two.relative_speed(one), "the lower of tensor rate and bandwidth")


def _times(base: Throughput, other: InstanceType, share: float, why: str) -> Throughput:
    latency = base.latency_ms
    return replace(
        base,
        size=other.size,
        per_second=base.per_second * share,
        latency_ms=latency / min(1.0, share) if latency else None,
        basis="scaled",
        note=f"{share:.3g} x {base.size} by {why}: modelled; {base.note}",
    )


def wait_ms(*, per_second: float, demand_per_second: float) -> float:
    """Return the wait before service that 95 % of requests do not exceed.

    One queue, random requests (Poisson), constant service time: M/D/1, with its exact exponential
    tail P(W > t) = K exp(-theta t), where theta solves demand (exp(theta S) - 1) = theta.
    """
    load = demand_per_second / per_second
    if load >= 1:
        return math.inf
    if load <= 1 - IN_TIME:
        return 0.0
    service = 1 / per_second
    low, high = 0.0, 2 * (1 - load) / service
    while demand_per_second * math.expm1(high * service) < high:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if demand_per_second * math.expm1(middle * service) < middle:
            low = middle
        else:
            high = middle
    theta = (low + high) / 2
    tail = (1 - load) / (load * math.exp(theta * service) - 1)
    return max(0.0, 1000 * math.log(tail / (1 - IN_TIME)) / theta)


def serve_online(
    throughput: Throughput, *, demand_per_second: float, latency_goal_ms: float, usd_per_hour: float
) -> Service | None:
    """Return the fewest instances with 95 % of requests in time; None if no number is enough.

    Instances are paid for while idle, so the idle share is part of the cost of each inference.
    """
    if throughput.service_ms > latency_goal_ms:
        return None
    needed = math.floor(demand_per_second / throughput.per_second) + 1
    for instances in range(needed, MAX_INSTANCES):
        each = demand_per_second / instances
        waiting = wait_ms(per_second=throughput.per_second, demand_per_second=each)
        latency = throughput.service_ms + waiting
        if latency <= latency_goal_ms:
            return Service(
                instances=instances,
                utilization=each / throughput.per_second,
                latency_ms=latency,
                usd_per_hour=instances * usd_per_hour,
                usd_per_million=instances * usd_per_hour / (demand_per_second * 3600) * 1e6,
            )
    return None


def batch_usd_per_million(throughput: Throughput, *, usd_per_hour: float) -> float:
    """Return dollars per million inferences at full load; the instance is stopped afterwards."""
    return usd_per_hour / (throughput.per_second * 3600) * 1e6
