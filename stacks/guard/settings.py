"""The inputs of the Guard's function: the construct's decisions, and clients of AWS services."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from botocore.exceptions import ClientError


@cache
def quick_client(service: str) -> Any:
    """Return the client of a service, made once: creating one costs more than a call."""
    # The app imports this module, and calls nothing: a third of a second for each synth.
    import boto3
    from botocore.config import Config

    # A service that does not answer must not use up the function's time: the other duties need it.
    retries = {"mode": "standard", "total_max_attempts": 2}
    return boto3.client(service, config=Config(connect_timeout=3, read_timeout=8, retries=retries))


def answer_or_none(call: Callable[..., Any], *codes: str, **request: Any) -> Any | None:
    """Return what a client's call answers; None where AWS refuses it with one of these codes."""
    try:
        return call(**request)
    except ClientError as error:
        if error.response["Error"]["Code"] in codes:
            return None
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The plan's figures for the run, used until the trainer has measured them."""

    stages: Mapping[str, float]  # seconds of each, in order
    restart_seconds: float  # from a request for a machine to its first step, and waits for data
    save_seconds: float  # a commit
    interval_seconds: float  # the most work between two commits
    # Seconds of each stage if its steps are as slow as similar runs' p90.
    slow_stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of all stages."""
        return sum(self.stages.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardSettings:
    """The construct's decisions, read from the function's environment; 0 means no limit."""

    stack_name: str
    fleet_parameter: str
    run_bucket: str
    run_prefix: str
    topic_arn: str
    max_billed_hours: float
    max_usd: float = 0.0
    max_wait_hours: float = 0.0
    # What this run and others of the budget's name may cost together in a day, month or year.
    budget_name: str = ""
    budget_usd: float = 0.0
    budget_period: str = "month"
    heartbeat_timeout_seconds: float
    max_barren_attempts: int
    # The time that a notice leaves a machine to save before the Guard ends it.
    notice_seconds: float
    # How many of the fleet's one instance the template has on demand: 0 or 1.
    on_demand_base: int = 0
    # Counted from the run's first instance; 0: the fleet stays as the template has it.
    deadline_hours: float = 0.0
    # The longest time from one call to the next.
    call_every_seconds: float = 660.0
    forecast: Forecast | None = None
    # Dollars per hour by size and market; the stack's own size comes first.
    prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    storage_usd_per_hour: float = 0.0  # a machine's volumes and its public address
    subnets: Sequence[str] = ()  # of the fleet

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "GuardSettings":
        """Read the variables; a missing one is a KeyError with its name."""
        return cls(
            stack_name=environment["STACK_NAME"],
            fleet_parameter=environment["FLEET_PARAMETER"],
            run_bucket=environment["RUN_BUCKET"],
            run_prefix=environment["RUN_PREFIX"],
            topic_arn=environment["TOPIC_ARN"],
            max_billed_hours=float(environment["MAX_BILLED_HOURS"]),
            max_usd=float(environment["MAX_USD"]),
            max_wait_hours=float(environment["MAX_WAIT_HOURS"]),
            budget_name=environment.get("BUDGET_NAME", ""),
            budget_usd=float(environment.get("BUDGET_USD", 0)),
            budget_period=environment.get("BUDGET_PERIOD", "month"),
            heartbeat_timeout_seconds=float(environment["HEARTBEAT_TIMEOUT_SECONDS"]),
            max_barren_attempts=int(environment["MAX_BARREN_ATTEMPTS"]),
            notice_seconds=float(environment["NOTICE_SECONDS"]),
            on_demand_base=int(environment.get("ON_DEMAND_BASE", 0)),
            deadline_hours=float(environment.get("DEADLINE_HOURS", 0)),
            call_every_seconds=float(environment.get("CALL_EVERY_SECONDS", 660)),
            forecast=_forecast(environment.get("FORECAST", "null")),
            prices=json.loads(environment["USD_PER_HOUR"]),
            storage_usd_per_hour=float(environment.get("STORAGE_USD_PER_HOUR", 0)),
            subnets=environment.get("SUBNETS", "").split(",") if environment.get("SUBNETS") else (),
        )

    @property
    def tick_seconds(self) -> float:
        """How long a machine that the next call ends may still run: until then, and two notices."""
        return self.call_every_seconds + 2 * self.notice_seconds

    @property
    def run_id(self) -> str:
        """The last part of the run's prefix."""
        return self.run_prefix.rpartition("/")[2]

    @property
    def run_uri(self) -> str:
        """The S3 URI of the run's objects."""
        return f"s3://{self.run_bucket}/{self.run_prefix}"

    @property
    def planned_usd_per_hour(self) -> float:
        """Dollars an hour of a machine to come, with volumes and address."""
        market = "on-demand" if self.on_demand_base else "spot"
        return self.usd_per_hour(market=market) + self.storage_usd_per_hour

    def usd_per_hour(self, size: str = "", market: str = "spot") -> float:
        """Return the price of a size, or of the stack's own size if that is not known."""
        known = self.prices.get(size) or next(iter(self.prices.values()), {})
        return known.get(market, 0.0)


def _forecast(text: str) -> Forecast | None:
    document = json.loads(text)
    return None if document is None else Forecast(**document)
