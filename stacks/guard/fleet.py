"""The stack's Spot fleet and its instances: as EC2 describes them, and the ways to end them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import ClientError

from stacks.guard.settings import GuardSettings, answer_or_none, quick_client

LIVE_STATES = frozenset(["pending", "running"])
SPOT, ON_DEMAND = "spot", "on-demand"
# EC2 gives it to every instance that a Spot fleet starts.
FLEET_TAG = "aws:ec2spot:fleet-request-id"
# EC2's API reference, StateReason: Spot took the instance back, whatever it was doing.
TAKEN_BACK = frozenset(["Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"])
_WHEN = re.compile(r"\((\d+-\d+-\d+ \d+:\d+:\d+) (?:GMT|UTC)\)")
# EC2's error codes for conditions that will have passed some minutes later.
PASSING = frozenset(["FleetNotInModifiableState", "InvalidSpotFleetRequestId.NotFound"])


class NotCancelledError(RuntimeError):
    """EC2 accepted the call but did not cancel the fleet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackInstance:
    """One instance of the stack; `launched` is in seconds since 1970."""

    id: str
    run_id: str
    fleet_id: str  # empty where the tag is missing
    size: str
    market: str
    launched: float
    is_live: bool
    is_running: bool = False  # not just requested
    is_taken_back: bool = False
    zone: str = ""
    ended_by: str = ""  # why it ended, in EC2's words
    ended: float = 0.0  # since 1970; 0 where EC2 does not say

    def __str__(self) -> str:
        return f"{self.id} ({self.size}, {self.market})"

    @property
    def is_on_demand(self) -> bool:
        """Whether it is no Spot instance: nobody takes it back, and it gets no notice."""
        return self.market == ON_DEMAND

    def terminate(self) -> None:
        """Shut the instance down for good; its trainer saves, as at every shutdown."""
        call = quick_client("ec2").terminate_instances
        answer_or_none(call, "InvalidInstanceID.NotFound", InstanceIds=[self.id])


def instances_of_stack(settings: GuardSettings) -> list[StackInstance]:
    """Return the stack's instances, of any run, including those of the last hour that ended."""
    mine = [{"Name": "tag:Stack", "Values": [settings.stack_name]}]
    pages = quick_client("ec2").get_paginator("describe_instances").paginate(Filters=mine)
    reservations = [each for page in pages for each in page["Reservations"]]
    return [_instance(one) for each in reservations for one in each["Instances"]]


def _instance(described: dict[str, Any]) -> StackInstance:
    tags = {each["Key"]: each["Value"] for each in described.get("Tags", [])}
    why, is_live = described.get("StateReason", {}), described["State"]["Name"] in LIVE_STATES
    # "User initiated (2026-11-28 12:34:56 GMT)", which a live instance may keep from a restart.
    ended = _WHEN.search("" if is_live else described.get("StateTransitionReason", ""))
    return StackInstance(
        id=described["InstanceId"],
        run_id=tags.get("RunId", ""),
        fleet_id=tags.get(FLEET_TAG, ""),
        size=described["InstanceType"],
        market=SPOT if described.get("InstanceLifecycle") == "spot" else ON_DEMAND,
        launched=described["LaunchTime"].timestamp(),
        is_live=is_live,
        is_running=described["State"]["Name"] == "running",
        is_taken_back=why.get("Code") in TAKEN_BACK,
        zone=described.get("Placement", {}).get("AvailabilityZone", ""),
        ended_by=why.get("Message") or why.get("Code", ""),
        ended=datetime.fromisoformat(f"{ended[1]}Z").timestamp() if ended else 0.0,
    )


def spot_prices(instances: Iterable[StackInstance]) -> dict[tuple[str, str], float]:
    """Return current dollars per hour, by size and zone, of the sizes that run or ran on Spot."""
    sizes = sorted({each.size for each in instances if each.market == SPOT})
    if not sizes:
        return {}
    now = datetime.now(UTC)
    found = quick_client("ec2").describe_spot_price_history(
        InstanceTypes=sizes, ProductDescriptions=["Linux/UNIX"], StartTime=now, EndTime=now
    )
    return {
        (each["InstanceType"], each["AvailabilityZone"]): float(each["SpotPrice"])
        for each in found["SpotPriceHistory"]
    }


def own_fleet_id(settings: GuardSettings) -> str:
    """Return the id of the stack's fleet; empty while the stack is created or destroyed."""
    call, name = quick_client("ssm").get_parameter, settings.fleet_parameter
    found = answer_or_none(call, "ParameterNotFound", Name=name)
    return str(found["Parameter"]["Value"]) if found else ""


@dataclass(frozen=True, slots=True)
class StackFleet:
    """A Spot fleet by its id: how much it is to keep, and the two ways to stop it."""

    id: str

    def read_capacity(self) -> tuple[int, int]:
        """Return how many instances the fleet is to keep, and how many of them on demand.

        A fleet that is cancelled or gone keeps none.
        """
        call = quick_client("ec2").describe_spot_fleet_requests
        gone = "InvalidSpotFleetRequestId.NotFound"
        found = answer_or_none(call, gone, SpotFleetRequestIds=[self.id]) or {}
        for fleet in found.get("SpotFleetRequestConfigs", ()):
            if fleet["SpotFleetRequestState"] in ("submitted", "active", "modifying"):
                config = fleet["SpotFleetRequestConfig"]
                return int(config["TargetCapacity"]), int(config.get("OnDemandTargetCapacity") or 0)
        return 0, 0

    def set_capacity(self, capacity: int, on_demand: int) -> None:
        """Request `capacity` instances, `on_demand` of them on demand."""
        quick_client("ec2").modify_spot_fleet_request(
            SpotFleetRequestId=self.id, TargetCapacity=capacity, OnDemandTargetCapacity=on_demand
        )

    def send_to_zero(self) -> None:
        """Set the fleet's capacity to zero, on Spot and on demand."""
        self.set_capacity(0, 0)

    def cancel(self) -> None:
        """End the fleet for good, and its instances; their trainers save, as at every shutdown."""
        answer = quick_client("ec2").cancel_spot_fleet_requests(
            SpotFleetRequestIds=[self.id], TerminateInstances=True
        )
        for each in answer.get("UnsuccessfulFleetRequests", []):
            raise NotCancelledError(f"({each['Error']['Code']}) {each['Error']['Message']}")


def refusal_of(call: Callable[[], None]) -> str:
    """Make a call; return EC2's refusal, empty without one. Errors that may pass are raised."""
    try:
        call()
    except NotCancelledError as error:
        return str(error)
    except ClientError as error:
        code = error.response["Error"]["Code"]
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status >= 500 or code in PASSING or "Throttl" in code or "LimitExceeded" in code:
            raise
        return str(error)
    return ""
