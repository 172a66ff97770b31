"""The fields of the stack parameters: their names and types; StackParameters adds the checks."""

from dataclasses import dataclass

from sizing import catalogue
from sizing.catalogue import InstanceType
from stacks.parameters.context import Named


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterFields:
    """All parameters of a deployment, unchecked: build StackParameters instead."""

    size: str
    workload: str
    recipe: str
    overrides: tuple[str, ...]
    program: str
    source: str
    requirements: str
    working_folder: str
    interpreter: str
    hyperparameter: Named
    env: Named
    metric: Named
    channels: tuple[str, ...]
    notice_signal: str
    quiet_seconds: float
    run_id: str
    dataset: str
    dataset_manifest: str
    dataset_gib: float
    dataset_bucket: str
    run_bucket: str
    versions_kept_days: int
    access_logs: bool
    kms: str
    zones: tuple[str, ...]
    pytorch_ami_parameter: str
    root_volume_gib: int
    root_initialization_mib_per_second: int
    data_on: str
    data_volume_gib: int
    data_volume_iops: int
    data_volume_mib_per_second: int
    mix_gpus: bool
    alternates_price_factor: float
    on_demand_base: int
    target_capacity: int
    checkpoint_interval: str
    checkpoints_kept: str
    notice_budget_seconds: int
    notice_policy: str
    lease_ttl_seconds: int
    dataset_wait_seconds: int
    nan_retries: int
    nan_skips: int
    max_hours: float
    max_usd: float
    max_wait_hours: float
    deadline_hours: float
    heartbeat_timeout_seconds: int
    max_barren_attempts: int
    accept: tuple[str, ...]
    alarm_email: str
    alarm_gpu_utilization_percent: float
    alarm_gpu_memory_percent: float
    alarm_gpu_celsius: float
    alarm_disk_percent: float
    alarm_commit_seconds: int
    review_oidc_provider: str
    review_repository: str

    @property
    def instance(self) -> InstanceType:
        """The catalogue's record of the requested size."""
        return catalogue.find(self.size)

    @property
    def data_gib(self) -> int:
        """What the data mount holds on every size of the fleet."""
        if self.data_on == "ebs":
            return self.data_volume_gib
        return min(catalogue.find(size).instance_store_gib for size in self.sizes)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The requested size and its alternates: every size that the fleet may start."""
        others = catalogue.alternates(
            self.size, mix_gpus=self.mix_gpus, price_factor=self.alternates_price_factor
        )
        return (self.size, *(other.size for other in others))
