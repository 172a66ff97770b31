"""What the Guard's function is given: the construct's decisions, and clients of AWS services."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import boto3


@cache
def client(service: str) -> Any:
    """Return the client of a service, made once: creating one costs more than a call."""
    return boto3.client(service)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The construct's decisions, as the function's environment gives them."""

    stack_name: str
    fleet_parameter: str
    run_bucket: str
    run_prefix: str
    topic_arn: str
    max_billed_hours: float
    heartbeat_timeout_seconds: float
    max_barren_attempts: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Read the eight variables; a missing one is a KeyError with its name."""
        return cls(
            stack_name=environment["STACK_NAME"],
            fleet_parameter=environment["FLEET_PARAMETER"],
            run_bucket=environment["RUN_BUCKET"],
            run_prefix=environment["RUN_PREFIX"],
            topic_arn=environment["TOPIC_ARN"],
            max_billed_hours=float(environment["MAX_BILLED_HOURS"]),
            heartbeat_timeout_seconds=float(environment["HEARTBEAT_TIMEOUT_SECONDS"]),
            max_barren_attempts=int(environment["MAX_BARREN_ATTEMPTS"]),
        )

    @property
    def run_id(self) -> str:
        """The last part of the run's prefix."""
        return self.run_prefix.rpartition("/")[2]
