"""The instance catalogue: what EC2 sizes offer and what families are for, with sources.

Reads instances.csv and families.csv next to it: no network, no AWS call. Prices are us-east-1's.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from contract.trainer_options import RANKS
from sizing.catalogue.facts import facts
from sizing.csv_rows import read_rows

CATALOGUE_FILE = Path(__file__).with_name("instances.csv")
FAMILIES_FILE = Path(__file__).with_name("families.csv")
MAX_ALTERNATES = 4
# An alternate may cost this many times the requested size.
ALTERNATES_PRICE_FACTOR = 2.0

# The image whose release note names the families of facts.csv.
NOTED_IMAGE = "oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04"
# PyTorch's builds for CUDA 13 begin with Turing.
LEAST_COMPUTE_CAPABILITY = 7.5


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """One EC2 size. MB are decimal, GiB and MiB binary; `source` says where the figures are from.

    Fields ending in `_from_memory` were never checked against a source.
    """

    size: str
    family: str
    current_generation: bool
    vcpus: int
    memory_gib: float
    gpu: str
    num_gpus: int
    num_accelerators: int
    gpu_memory_mib: int
    instance_store_gb: int
    ebs_baseline_mb_per_second: float
    ebs_max_mb_per_second: float
    ebs_baseline_iops: int
    ebs_max_iops: int
    network_baseline_gbps: float
    network_peak_gbps: float
    network_label: str
    gpu_architecture_from_memory: str
    compute_capability_from_memory: str
    tensor_core_generation_from_memory: str
    on_demand_usd_per_hour: float | None
    spot_quota_code: str
    note: str
    source: str

    @property
    def kind(self) -> str:
        """The kind of its family: gpu, chip, cpu, burstable, ..."""
        return families()[self.family].kind

    @property
    def is_trainable(self) -> bool:
        """Whether the stack can train on it: it has NVIDIA GPUs of its own, which PyTorch supports.

        The machine's image must support them, too: see `needs_own_image`.
        """
        capability = float(self.compute_capability_from_memory or 0)
        return self.num_gpus > 0 and capability >= LEAST_COMPUTE_CAPABILITY

    @property
    def needs_own_image(self) -> bool:
        """Whether the release note of NOTED_IMAGE leaves it out."""
        return self.family not in facts()["image families"].value

    @property
    def quota_code(self) -> str:
        """The Spot quota's code as Service Quotas takes it: without the mark of doubt."""
        return self.spot_quota_code.rstrip("?")

    def has_same_gpu(self, other: "InstanceType") -> bool:
        """Whether a run has the same bits on both: an A100 of 80 GB is not one of 40."""
        return (self.gpu, self.gpu_memory_mib) == (other.gpu, other.gpu_memory_mib)

    @property
    def instance_store_gib(self) -> int:
        """The capacity of its own disks, in the units of a volume."""
        return int(self.instance_store_gb * 1e9 / 2**30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The purpose of a family of sizes: `fit` has train, serve, prepare, experiment or graphics."""

    name: str
    kind: Literal["gpu", "gpu-slice", "gpu-amd", "chip", "cpu", "burstable"]
    fit: frozenset[str]
    what: str
    source: str


def _one_card_gbps(row: Mapping[str, str]) -> float:
    """Return a card's share of a label such as "200 Gigabit" or "4x 100 Gigabit"; 0 without one.

    A machine of the stack has one network interface. Sizes with several cards have no rate of their
    own, and their cards' column is ambiguous; their networks do not burst.
    """
    found = re.fullmatch(r"(?:(\d+)x )?(\d+) Gigabit", row["network_label"])
    total = float(found[1] or 1) * float(found[2]) if found else 0.0
    return total / float(row["net_cards"] or 1)


@cache
def instances() -> dict[str, InstanceType]:
    """Return all known sizes by name, in the order of the file."""

    def num_gpus(row: Mapping[str, str]) -> int:
        return int(row["num_accelerators"]) if row["gpu"].startswith("NVIDIA") else 0

    def gbps(column: str) -> Callable[[Mapping[str, str]], float]:
        return lambda row: float(row[column] or _one_card_gbps(row))

    rows = read_rows(
        CATALOGUE_FILE,
        InstanceType,
        num_gpus=num_gpus,
        network_baseline_gbps=gbps("network_baseline_gbps"),
        network_peak_gbps=gbps("network_peak_gbps"),
    )
    return {each.size: each for each in rows}


@cache
def families() -> dict[str, Family]:
    """Return what each family is for, by name."""
    return {family.name: family for family in read_rows(FAMILIES_FILE, Family)}


def find(size: str) -> InstanceType:
    """Return the size called `size`; an unknown one is a ValueError that names the nearest."""
    found = instances().get(size)
    if found is None:
        near = difflib.get_close_matches(size, instances(), n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "try g5.xlarge"
        raise ValueError(f"size {size!r} is not in the instance catalogue; {hint}")
    return found


def alternates(
    size: str,
    *,
    mix_gpus: bool = False,
    mix_gpu_counts: bool = False,
    price_factor: float = ALTERNATES_PRICE_FACTOR,
    families: Collection[str] | None = None,
) -> tuple[InstanceType, ...]:
    """Return the 0 to 4 cheapest other sizes with the same GPUs and at least the memory.

    None costs more than `price_factor` times the size itself, on demand: the fleet starts any Spot
    pool that has machines, and a pool's price says little about the next hour's.

    On these sizes a run stays the same bit for bit. `mix_gpus` gives that up for more pools: any
    model with at least the memory. `mix_gpu_counts` keeps it: up to 4 sizes of each of RANKS,
    with memory and price compared per GPU. `families` are those that they may be of.
    """
    wanted = find(size)
    counts = dict.fromkeys((wanted.num_gpus, *(RANKS if mix_gpu_counts else ())))
    found: list[InstanceType] = []
    for count in counts if wanted.is_trainable else ():
        times = count / wanted.num_gpus
        most = times * price_factor * (wanted.on_demand_usd_per_hour or 0.0)
        siblings = [
            other
            for other in trainable_by_price()
            if other.size != wanted.size
            and (not other.needs_own_image or other.family == wanted.family)
            and (families is None or other.family in families)
            and (other.on_demand_usd_per_hour or 0.0) <= most
            and (mix_gpus or other.has_same_gpu(wanted))
            and other.num_gpus == count
            and other.gpu_memory_mib >= wanted.gpu_memory_mib
            and other.memory_gib >= times * wanted.memory_gib
        ]
        found += siblings[:MAX_ALTERNATES]
    return tuple(found)


@cache
def trainable_by_price() -> tuple[InstanceType, ...]:
    """Return the sizes that the stack can train on, cheapest on demand first."""
    found = [i for i in instances().values() if i.is_trainable and i.on_demand_usd_per_hour]
    return tuple(sorted(found, key=lambda i: (i.on_demand_usd_per_hour or 0.0, i.size)))
