"""Every decision of a deployment, made for one instance size and overridden by name from context.

The defaults stand in cdk.json; what depends on the size says "by-size" there. Unknown names and
impossible values are refused in one sentence. The tables: python -m stacks.parameters --help
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sizing import catalogue
from sizing.catalogue import Instance
from stacks.parameters import checks
from stacks.parameters.context import (
    LEFT_OPEN,
    defaults,
    ours,
    parse,
    parse_text,
    refuse_unknown_names,
)
from stacks.parameters.decisions import DECISIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class StackParameters:
    """What both stacks are made from. Build it with `for_size` or `from_context`."""

    size: str
    workload: str
    recipe: str
    overrides: tuple[str, ...]
    run_id: str
    dataset: str
    dataset_manifest: str
    dataset_gib: float
    dataset_bucket: str
    run_bucket: str
    access_logs: bool
    kms: str
    zones: tuple[str, ...]
    pytorch_ami_parameter: str
    root_volume_gib: int
    data_volume_gib: int
    data_volume_iops: int
    data_volume_mib_per_second: int
    mix_gpus: bool
    on_demand_base: int
    target_capacity: int
    checkpoint_interval: str
    checkpoints_kept: str
    notice_budget_seconds: int
    notice_policy: str
    lease_ttl_seconds: int
    dataset_wait_seconds: int
    max_hours: float
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

    @classmethod
    def for_size(cls, size: str, **overrides: object) -> StackParameters:
        """Return the parameters of `size` with cdk.json's defaults and the given overrides."""
        return cls.from_context({**defaults(), **overrides, "size": size})

    @classmethod
    def from_context(cls, context: Mapping[str, object]) -> StackParameters:
        """Return the parameters that CDK context spells; CDK's own keys in it are passed over."""
        given = ours(context)
        fields = dataclasses.fields(cls)
        refuse_unknown_names(given, [field.name for field in fields])
        values = {**defaults(), **given}
        instance = catalogue.find(parse_text("size", values["size"]))
        for name, decide in DECISIONS.items():
            if values[name] in LEFT_OPEN:
                values[name] = decide(instance, values)
        parsed = {
            field.name: parse(str(field.type), field.name, values[field.name]) for field in fields
        }
        return cls(**parsed)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        checks.check_names(self)
        checks.check_size(self)
        checks.check_volumes(self)
        checks.check_fleet(self)
        checks.check_times(self)
        checks.check_alarms(self)
        checks.check_kept(self)
        checks.check_review(self)

    @property
    def instance(self) -> Instance:
        """The catalogue's record of the size asked for."""
        return catalogue.find(self.size)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The size asked for and its alternates: every size that the fleet may start."""
        others = catalogue.alternates(self.size, mix_gpus=self.mix_gpus)
        return (self.size, *(other.size for other in others))
