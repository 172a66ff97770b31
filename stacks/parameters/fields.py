"""Every stack parameter: its name, type, meaning and an example; cdk.json has the defaults.

docs/parameters.md is made from this table. StackParameters adds how they are read and checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

from contract.aws_limits import most
from contract.notice import MAX_SECONDS
from contract.stack_names import image_stack, stack_name, training_stack
from contract.trainer_options import OPTIONS
from sizing import InstanceType, catalogue

GP3_MAX_GIB = most("volume-size")
# The Deep Learning AMI's snapshot was 30 to 140 GB over the years; no smaller root can launch.
MIN_ROOT_GIB = 100
MAX_HOURS = 8760
# Only the options that differ from the trainer's defaults.
TrainerOptions: TypeAlias = Mapping[str, str]
# The groups whose names are open: the contract has those of train, the user those of tags.
OPEN_GROUPS = ("train", "tags")


def _about(meaning: str, example: str, least: float = -inf, up_to: float = inf) -> Any:
    """Describe a field; a number below `least` or above `up_to` is refused."""
    limits = {"least": least, "most": up_to}
    return field(metadata={"meaning": meaning, "example": example, **limits})


@dataclass(frozen=True, kw_only=True, slots=True)
class RootVolume:
    """The volume that the image is on."""

    gib: int = _about("size of the root volume", "150", MIN_ROOT_GIB, GP3_MAX_GIB)
    initialization_mib_per_second: int = _about(
        "how fast EBS loads the image before it is read; 0: EBS's own rate, which is free", "300"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataVolume:
    """The volume for dataset and staged checkpoints, where data_on is ebs."""

    gib: int = _about("size of the data volume", "400", 1, GP3_MAX_GIB)
    iops: int = _about("its IOPS", "6000")
    mib_per_second: int = _about("its throughput", "500")


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardPatience:
    """How long the Guard watches a run that does not progress."""

    heartbeat_timeout_seconds: int = _about(
        "without a heartbeat, or progress of its boot, for this long while an instance runs, the "
        "Guard stops the run",
        "7200",
    )
    max_barren_attempts: int = _about(
        "after this many attempts in a row without a commit, the Guard stops the run", "10", 1, 100
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBudget:
    """What several runs may cost together; without a name there is none."""

    name: str = _about("runs whose stacks name the same budget share it; empty: none", "team")
    usd: float = _about("dollars that they may cost together in a period", "300", 0)
    period: str = _about("how long it lasts, in UTC: day, month or year", "day")


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmSettings:
    """When the alarms fire, and whom they reach."""

    email: str = _about("who gets the alarms; empty: no one", "you@example.org")
    gpu_utilization_percent: float = _about(
        "GpuUtilizationLow fires below it, or below half of the plan's minimum if that is lower",
        "40",
    )
    gpu_memory_percent: float = _about("GpuMemoryNearlyFull fires from here up", "98")
    gpu_celsius: float = _about("GpuHot fires from here up", "90", 40, 110)
    disk_percent: float = _about("DiskNearlyFull fires from here up", "80")
    commit_seconds: int = _about("CommitTooOld fires when the last commit is this old", "14400")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReviewAccess:
    """ReviewStack's access for a repository's pull requests; set both or neither."""

    oidc_provider: str = _about(
        "ARN of the account's provider for GitHub's tokens",
        "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com",
    )
    repository: str = _about("whose pull requests may read the templates", "me@1/mine@2")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepQueue:
    """SweepStack's queue of many runs; without instances there is none."""

    instances: int = _about(
        "how many of SageMaker's instances sweeps train on at once; 0: no SweepStack", "4", 0
    )
    shares: tuple[str, ...] = _about(
        "who shares them, each with its parts; empty: first in, first out", "vision=3 text=1"
    )
    repository: str = _about("the repository in ECR whose images its jobs may start", "training")

    @property
    def parts(self) -> Mapping[str, float]:
        """Share -> its parts of the capacity."""
        return {name: float(parts) for name, _, parts in (s.partition("=") for s in self.shares)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterFields:
    """All parameters of a deployment, unchecked: build StackParameters instead."""

    name: str = _about("names the stack, so that several can exist side by side", "vision")
    size: str = _about("instance size", "g5.xlarge")
    workload: str = _about(
        "what is trained: a known workload, or your own as package.module:NAME", "growth"
    )
    recipe: str = _about("which configuration of the workload", "laptop")
    overrides: tuple[str, ...] = _about("fields of the recipe to change", "epochs=20 width=128")
    train: TrainerOptions
    program: str = _about(
        "your own training program: its command, or a program.json", "python train.py"
    )
    source: str = _about(
        "the folder of your program or workload; empty: the program.json's", "path/to/folder"
    )
    run_id: str = _about("names the run; a new id starts a new one", "run-2")
    dataset: str = _about("the dataset's prefix in its bucket", "clips/v2")
    dataset_manifest: str = _about(
        "the dataset's manifest.json, for the plan", "data/manifest.json"
    )
    dataset_gib: float = _about("the dataset's size", "150", 0)
    dataset_bucket: str = _about("an existing bucket to adopt; empty: a new one", "my-data")
    run_bucket: str = _about("an existing bucket to adopt; empty: a new one", "my-runs")
    versions_kept_days: int = _about(
        "how long deleted and replaced objects of runs stay", "30", 1, 365
    )
    access_logs: bool = _about("whether S3 logs each access to the buckets", "true")
    kms: str = _about("key of the data: `create`, an ARN, or empty for AWS's own", "create")
    zones: tuple[str, ...] = _about("availability zones; empty: two", "us-east-1a,us-east-1b")
    prefix: str = _about(
        "begins each stack's name, so that none is another project's", "VisionTeam-"
    )
    vpc: str = _about("an existing VPC, in place of NetworkStack's", "vpc-0123456789abcdef0")
    subnets: tuple[str, ...] = _about(
        "its private subnets", "subnet-0123456789abcdef0,subnet-0fedcba9876543210"
    )
    tags: Mapping[str, str]
    pytorch_ami_parameter: str = _about(
        "SSM parameter of the newest image, which a new run takes and keeps; or an image's id",
        "ami-0123456789abcdef0",
    )
    root_volume: RootVolume
    data_on: str = _about("what /data is on: the volume, or the size's own disks", "nvme")
    data_volume: DataVolume
    mix_gpus: bool = _about("whether sizes with other GPUs may be started too", "true")
    mix_gpu_counts: bool = _about(
        "whether sizes with 1, 2, 4 or 8 of the same GPUs may be started; a run continues on them "
        "bit for bit",
        "true",
    )
    alternates_price_factor: float = _about(
        "how many times the size's price another size may cost, for as many GPUs", "1.5", 1, 100
    )
    fleet: str = _about(
        "what starts machines: a Spot fleet, or where that is denied, Auto Scaling groups", "asg"
    )
    on_demand_base: int = _about("1: an on-demand instance, never Spot", "1")
    target_capacity: int = _about("0: a fleet without an instance", "0", 0, 1)
    notice_budget_seconds: int = _about(
        "from a Spot notice to the machine's end, two minutes at most", "90", 5, MAX_SECONDS
    )
    dataset_wait_seconds: int = _about(
        "how long a machine waits for the dataset's upload", "0", 0, 86_400
    )
    max_hours: float = _about("billed hours after which the Guard stops the run", "5")
    max_usd: float = _about("dollars after which it does; 0: no limit", "20", 0, 999_999)
    max_wait_hours: float = _about(
        "hours without a machine after which it does; 0: none", "48", 0, MAX_HOURS
    )
    deadline_hours: float = _about(
        "hours within which the run must end; 0: no deadline", "72", 0, MAX_HOURS
    )
    budget: SharedBudget
    guard: GuardPatience
    accept: tuple[str, ...] = _about("problems of the plan to accept", "memory,notice")
    alarm: AlarmSettings
    review: ReviewAccess
    sweep: SweepQueue

    if TYPE_CHECKING:
        region: str  # of StackParameters

    @property
    def training(self) -> str:
        """The construct id of the training stack, by which the CDK CLI selects it."""
        return training_stack(self.name)

    @property
    def stack_name(self) -> str:
        """The name of the training stack in CloudFormation."""
        return self.name_of(self.training)

    def name_of(self, construct_id: str) -> str:
        """Return the name of one of the app's stacks in CloudFormation."""
        return stack_name(self.prefix, construct_id)

    @property
    def image_stack(self) -> str:
        """The construct id of the stack that keeps the run's image; empty if the image is an id."""
        parameter = self.pytorch_ami_parameter
        return image_stack(self.run_id, parameter) if parameter.startswith("/") else ""

    @property
    def instance(self) -> InstanceType:
        """The catalogue's record of the requested size."""
        return catalogue.find(self.size)

    @property
    def data_gib(self) -> int:
        """GiB that the data mount holds on every size of the fleet."""
        if self.data_on == "ebs":
            return self.data_volume.gib
        return min(catalogue.find(size).instance_store_gib for size in self.sizes)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The requested size and its alternates: every size that the fleet may start."""
        others = catalogue.alternates(
            self.size,
            mix_gpus=self.mix_gpus,
            mix_gpu_counts=self.mix_gpu_counts,
            price_factor=self.alternates_price_factor,
            region=self.region,
        )
        return (self.size, *(other.size for other in others))

    def trainer_option(self, name: str) -> str:
        """Return a trainer option as given, else the trainer's default."""
        return self.train.get(name, OPTIONS[name].default or "")

    def flat(self) -> dict[str, Any]:
        """Return each value by the name that `-c` takes; of open groups, only what is given."""
        values: dict[str, Any] = {}
        for name in KINDS:
            first, _, rest = name.partition(".")
            value = getattr(self, first)
            values[name] = getattr(value, rest) if rest else value
        for group in OPEN_GROUPS:
            values |= {f"{group}.{key}": text for key, text in getattr(self, group).items()}
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterKind:
    """The type of a parameter, its meaning, an example and its limits."""

    type: Any
    meaning: str
    example: str
    least: float
    most: float

    @property
    def range(self) -> str:
        """The allowed values if they do not depend on other parameters, else empty."""
        if self.least == -inf:
            return ""
        return f"{self.least:g} to {self.most:g}" if self.most < inf else f"{self.least:g} or more"


def _kinds() -> Iterator[tuple[str, ParameterKind]]:
    for each in fields(ParameterFields):
        inner = fields(each.type) if is_dataclass(each.type) else ()
        named = [(f"{each.name}.{one.name}", one) for one in inner] or [(each.name, each)]
        for name, one in named:
            if one.name not in OPEN_GROUPS:
                yield name, ParameterKind(type=one.type, **one.metadata)


# By the name that `-c` takes: alarm.email. The trainer's options are in the contract.
KINDS: Mapping[str, ParameterKind] = dict(_kinds())
GROUPS: Mapping[str, Any] = {
    each.name: each.type for each in fields(ParameterFields) if is_dataclass(each.type)
}
