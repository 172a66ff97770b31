"""The request for a plan, as made by the command line, cdk synth or a finished run."""

import math
from dataclasses import dataclass, field

from contract.notice import MAX_SECONDS
from contract.run_env import DATA_PLACES
from contract.trainer_options import RANKS
from sizing import catalogue
from sizing.catalogue import InstanceType
from sizing.catalogue.refresh import PriceBook
from sizing.models.data_path import GP3_MB_PER_SECOND, MB_PER_MIB
from sizing.plan.dataset import DatasetFacts
from sizing.spot.traces import Trace

# gp3's highest throughput.
_GP3_MAX_MIB_PER_SECOND = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One run on one size. All fields except the first three have the stack's defaults."""

    workload: str
    recipe: str
    size: str
    micro_batch: int | None = None
    batch: int | None = None
    samples: int | None = None
    epochs: float | None = None
    gpus: int = 1
    hosts: int = 1  # machines that train one run together, each with that many GPUs
    sharded: bool = False  # parameters, gradients and optimizer are spread over them
    runs: int = 1
    data_on: str = "ebs"
    volume_gib: int | None = None  # default: 200, or the instance store's
    volume_mib_per_second: float | None = None
    root_initialization_mib_per_second: float = 0.0  # 0: the default rate, which costs nothing
    notice_seconds: float | None = None
    trains_on_at_notice: bool = True
    checkpoint_interval: str = "auto"
    dataset_gib: float | None = None
    dataset: DatasetFacts | None = None  # the facts in its manifest
    unshared_gib: float = 0.0
    rate_per_hour: float | None = None
    trace: Trace | None = None
    pools: int = 2
    prices: PriceBook = field(default_factory=PriceBook)
    max_hours: float | None = None
    max_usd: float | None = None
    deadline_hours: float | None = None
    on_demand: bool = False

    def __post_init__(self) -> None:
        for name in ("volume_gib", "runs", "hosts", "batch", "micro_batch", "samples"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 1e12:
                raise ValueError(f"{name} is {value}; use 1 to a trillion")
        if self.data_on not in DATA_PLACES:
            raise ValueError(f"data_on is {self.data_on!r}; use {' or '.join(DATA_PLACES)}")
        if self.epochs is not None and not 0 < self.epochs < 1e9:
            raise ValueError(f"epochs is {self.epochs:g}; use a number above 0, below 1e9")
        for name in ("dataset_gib", "unshared_gib", "rate_per_hour", "volume_mib_per_second"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e6:
                raise ValueError(f"{name} is {value}; use a number from 0 to a million")
        if self.hosts > 1 and (self.ranks not in RANKS or self.runs > 1 or self.trace):
            raise ValueError(
                f"hosts is {self.hosts} with {self.gpus} GPUs each; use 1, 2, 4 or 8 GPUs in all, "
                "one run, and a rate instead of one machine's trace"
            )
        if self.rate_per_hour is not None and self.trace is not None:
            raise ValueError("a rate and a trace contradict each other; use one of them")
        if self.notice_seconds is not None and not 0 <= self.notice_seconds <= MAX_SECONDS:
            raise ValueError(
                f"notice_seconds is {self.notice_seconds:g}; EC2 gives at most {MAX_SECONDS}, "
                f"use 0 to {MAX_SECONDS}"
            )

    @property
    def ranks(self) -> int:
        """GPUs that share a step's batch."""
        return self.gpus * self.hosts

    @property
    def data_gib(self) -> int:
        """GiB that the data mount holds."""
        if self.data_on == "ebs":
            return self.volume_gib or 200
        # An instance store cannot be larger than it is, whatever is requested.
        store = catalogue.find(self.size).instance_store_gib
        return min(store, self.volume_gib or store)

    def find_instance(self) -> InstanceType:
        """Return the size's instance; a ValueError if it cannot train with that many GPUs."""
        instance = catalogue.find(self.size)
        if instance.num_gpus < 1:
            raise ValueError(
                f"size {self.size} has no NVIDIA GPU of its own to train on; "
                "the smallest that has one is g4dn.xlarge"
            )
        if self.data_on == "nvme" and not instance.instance_store_gb:
            raise ValueError(f"data_on is 'nvme', and {self.size} has no instance store; use ebs")
        if not 1 <= self.gpus <= instance.num_gpus:
            raise ValueError(f"gpus is {self.gpus}; {self.size} has {instance.num_gpus}")
        return instance

    def runs_per_gpu(self, instance: InstanceType) -> int:
        """Return the most runs that share a GPU: they are spread over all GPUs of the size."""
        return math.ceil(self.runs / (instance.num_gpus // self.gpus))

    def volume_mb_per_second(self, instance: InstanceType) -> float:
        """Return the volume's throughput: as set, else what the size sustains, at least gp3's."""
        if self.volume_mib_per_second:
            return self.volume_mib_per_second * MB_PER_MIB
        most = min(instance.ebs_baseline_mb_per_second, _GP3_MAX_MIB_PER_SECOND * MB_PER_MIB)
        return max(GP3_MB_PER_SECOND, most)
