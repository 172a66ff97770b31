"""A smaller size for an endpoint that uses little of its own, from the share that it uses.

The other size must deliver the speed in use at a target share of its own: for a GPU both its memory
bandwidth and its half-precision peak, for CPUs its vCPUs. This is modelled: a measured throughput
(`select --throughput`) is better.
"""

from dataclasses import dataclass

from sizing import catalogue
from sizing.catalogue import InstanceType
from sizing.catalogue.gpus import find_gpu
from sizing.models.burstable import baseline_percent
from sizing.select.ranking import UNSUPPORTED, Prices

# The most that an endpoint should use of its GPU or CPUs: beyond it, requests wait for each other.
TARGET_PERCENT = 70.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A size that would handle the same load, with its utilization and saving."""

    size: str
    usd_per_hour: float
    busy_percent: float
    saving_percent: float
    cautions: tuple[str, ...]


def busy_percent(now: str, percent: float, other: str) -> float:
    """Return the percent of `other` needed by a load that uses `percent` of `now`."""
    if not 0 < percent <= 100:
        raise ValueError(f"the share in use is {percent:g} %; use more than 0, at most 100")
    one, two = catalogue.find(now), catalogue.find(other)
    if not one.num_gpus:
        return percent * one.vcpus / two.vcpus
    ours, theirs = (find_gpu(each.gpu, each.gpu_memory_mib) for each in (one, two))
    return percent * one.num_gpus / (theirs.relative_speed(ours) * two.num_gpus)


def rightsize(
    now: str, percent: float, prices: Prices, *, memory_mib: float | None = None
) -> list[Move]:
    """Return the sizes that handle the load for less, cheapest first.

    memory_mib: memory in use, on a GPU or a host without one; by default all that the size has.
    """
    instance = catalogue.find(now)
    price, _ = prices(now)
    if price is None:
        raise ValueError(
            f"no price of {now} is known; ask AWS for it: python -m sizing catalogue --refresh"
        )
    found = []
    for other in catalogue.instances().values():
        there, _ = prices(other.size)
        if there is None or there.usd_per_hour >= price.usd_per_hour:
            continue
        if not _is_like(instance, other, memory_mib):
            continue
        busy = busy_percent(now, percent, other.size)
        if busy <= _most_percent(other):
            found.append(
                Move(
                    size=other.size,
                    usd_per_hour=there.usd_per_hour,
                    busy_percent=busy,
                    saving_percent=100 * (1 - there.usd_per_hour / price.usd_per_hour),
                    cautions=tuple(filter(None, [UNSUPPORTED.get(other.family)])),
                )
            )
    return sorted(found, key=lambda each: (bool(each.cautions), each.usd_per_hour))


def _most_percent(instance: InstanceType) -> float:
    """Return the percent of a size that may be in use; if burstable, what its credits sustain."""
    if instance.kind != "burstable":
        return TARGET_PERCENT
    return min(TARGET_PERCENT, baseline_percent(instance.size))


def _is_like(now: InstanceType, other: InstanceType, memory_mib: float | None) -> bool:
    """Whether the same program runs there: NVIDIA GPUs with the memory, or CPUs."""
    if not now.num_gpus:
        need = now.memory_gib * 1024 if memory_mib is None else memory_mib
        cpu = other.kind in ("cpu", "burstable")
        return cpu and other.memory_gib * 1024 >= need
    need = now.gpu_memory_mib if memory_mib is None else memory_mib
    return other.num_gpus > 0 and other.gpu_memory_mib >= need
