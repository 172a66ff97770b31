"""What serving a model costs at the actual demand: instances, waiting times, dollars per million.

Throughputs are published with their source, scaled (and marked as such), or the user's own.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from sizing import catalogue

THROUGHPUTS_FILE = Path(__file__).with_name("throughputs.csv")
# The share of requests that must meet the latency goal.
IN_TIME = 0.95
MAX_INSTANCES = 10_000
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

    @property
    def service_ms(self) -> float:
        """Milliseconds of one inference; where not published, what one at a time would take."""
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
def published(model: str, use: Use) -> tuple[Throughput, ...]:
    """Return published throughputs of a model, and those of its CPU sizes scaled by vCPUs."""
    with THROUGHPUTS_FILE.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["model"] == model]
    found = [_throughput(row) for row in rows if use in row["use"].split("|")]
    known = {each.size for each in found}
    return (*found, *(each for each in _scaled(found) if each.size not in known))


@cache
def models() -> tuple[str, ...]:
    """Return the models with published throughputs."""
    with THROUGHPUTS_FILE.open(newline="", encoding="utf-8") as lines:
        return tuple(sorted({row["model"] for row in csv.DictReader(lines)}))


def _throughput(row: dict[str, str]) -> Throughput:
    return Throughput(
        size=row["instance_type"],
        per_second=float(row["per_second"]),
        latency_ms=float(row["latency_ms"]) if row["latency_ms"] else None,
        basis=cast(Any, row["basis"]),
        note=row["note"],
        source=row["source"],
    )


def _scaled(found: Sequence[Throughput]) -> list[Throughput]:
    """Scale to half to four times the vCPUs of a CPU size: modelled, not measured."""
    scaled = []
    for base in found:
        instance = catalogue.find(base.size)
        # Large sizes scale badly, as the c5.18xlarge shows.
        if catalogue.families()[instance.family].kind != "cpu" or instance.vcpus > 8:
            continue
        for other in catalogue.instances().values():
            share = other.vcpus / instance.vcpus
            if other.family == instance.family and other != instance and 0.5 <= share <= 4:
                scaled.append(
                    replace(
                        base,
                        size=other.size,
                        per_second=base.per_second * share,
                        basis="scaled",
                        note=f"{share:g} x {base.size} by vCPUs: modelled; {base.note}",
                    )
                )
    return scaled


def wait_ms(*, per_second: float, demand_per_second: float, share: float = IN_TIME) -> float:
    """Return the wait before service that `share` of the requests do not exceed.

    One queue, random requests (Poisson), constant service time: M/D/1, with its exact exponential
    tail P(W > t) = K exp(-theta t), where theta solves demand (exp(theta S) - 1) = theta.
    """
    load = demand_per_second / per_second
    if load >= 1:
        return math.inf
    if load <= 1 - share:
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
    return max(0.0, 1000 * math.log(tail / (1 - share)) / theta)


def serve_online(
    throughput: Throughput,
    *,
    demand_per_second: float,
    latency_goal_ms: float,
    usd_per_hour: float,
    least_instances: int = 1,
) -> Service | None:
    """Return the fewest instances with 95 % of requests in time; None if no number is enough.

    Instances are paid for while idle, so the idle share is part of the cost of each inference.
    """
    if throughput.service_ms > latency_goal_ms:
        return None
    needed = math.floor(demand_per_second / throughput.per_second) + 1
    for instances in range(max(least_instances, needed), MAX_INSTANCES):
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
