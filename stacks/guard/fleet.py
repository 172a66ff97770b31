"""The stack's fleet and its instances: as AWS describes them, and the ways to end them.

A fleet is a Spot fleet or a pair of Auto Scaling groups; its id says which.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from botocore.exceptions import ClientError

from contract.stack_names import NEW_GROUP, ON_DEMAND_GROUP
from stacks.guard.settings import GuardSettings, answer_or_none, quick_client

LIVE_STATES = frozenset(["pending", "running"])
SPOT, ON_DEMAND = "spot", "on-demand"
# AWS gives one of them to every instance that a fleet starts.
FLEET_TAGS = ("aws:ec2spot:fleet-request-id", "aws:autoscaling:groupName")
# How the lifecycle states begin of instances that a group counts.
PRESENT = ("Pending", "InService")
# EC2's API reference, StateReason: Spot took the instance back, whatever it was doing.
TAKEN_BACK = frozenset(["Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"])
# By size and zone: since when (seconds since 1970) how many dollars an hour, the oldest first.
SpotPrices = Mapping[tuple[str, str], Sequence[tuple[float, float]]]
_WHEN = re.compile(r"\((\d+-\d+-\d+ \d+:\d+:\d+) (?:GMT|UTC)\)")
# AWS's error codes for conditions that will have passed some minutes later.
PASSING = frozenset(
    [
        "FleetNotInModifiableState",
        "InvalidSpotFleetRequestId.NotFound",
        "ResourceContention",
        "ScalingActivityInProgress",
    ]
)


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
    is_stopped: bool = False  # by a person or AWS: its volumes are there, and billed
    is_gone: bool = False  # not just shutting down, in which its trainer saves
    is_taken_back: bool = False
    zone: str = ""
    zone_id: str = ""  # the same in every account
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
        if self.is_on_demand and self.fleet_id:
            StackFleet.of(self.fleet_id).let_go()
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
    place = described.get("Placement", {})
    # "User initiated (2026-11-28 12:34:56 GMT)", which a live instance may keep from a restart.
    ended = _WHEN.search("" if is_live else described.get("StateTransitionReason", ""))
    return StackInstance(
        id=described["InstanceId"],
        run_id=tags.get("RunId", ""),
        fleet_id=next((tags[each] for each in FLEET_TAGS if each in tags), "").removesuffix(
            ON_DEMAND_GROUP
        ),
        size=described["InstanceType"],
        market=SPOT if described.get("InstanceLifecycle") == "spot" else ON_DEMAND,
        launched=described["LaunchTime"].timestamp(),
        is_live=is_live,
        is_running=described["State"]["Name"] == "running",
        is_stopped=described["State"]["Name"] == "stopped",
        is_gone=described["State"]["Name"] == "terminated",
        is_taken_back=why.get("Code") in TAKEN_BACK,
        zone=(zone := place.get("AvailabilityZone", "")),
        zone_id=place.get("AvailabilityZoneId") or zone,
        ended_by=why.get("Message") or why.get("Code", ""),
        ended=datetime.fromisoformat(f"{ended[1]}Z").timestamp() if ended else 0.0,
    )


def spot_prices(instances: Iterable[StackInstance]) -> SpotPrices:
    """Return the last day's dollars per hour of the sizes that run or ran on Spot."""
    sizes = sorted({each.size for each in instances if each.market == SPOT})
    if not sizes:
        return {}
    now = datetime.now(UTC)
    # The first of a pool is the one in force at StartTime; EC2 lists the newest first.
    pages = (
        quick_client("ec2")
        .get_paginator("describe_spot_price_history")
        .paginate(
            InstanceTypes=sizes,
            ProductDescriptions=["Linux/UNIX"],
            StartTime=now - timedelta(days=1),
            EndTime=now,
        )
    )
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for each in (each for page in pages for each in page["SpotPriceHistory"]):
        pool = found.setdefault((each["InstanceType"], each["AvailabilityZone"]), [])
        pool.insert(0, (each["Timestamp"].timestamp(), float(each["SpotPrice"])))
    return {pool: sorted(changes, key=lambda each: each[0]) for pool, changes in found.items()}


def zones_of(subnets: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the id and the name of each subnet's zone."""
    found = quick_client("ec2").describe_subnets(SubnetIds=list(subnets))["Subnets"]
    return {
        each["SubnetId"]: (each.get("AvailabilityZoneId", ""), each["AvailabilityZone"])
        for each in found
    }


def own_fleet_id(settings: GuardSettings) -> str:
    """Return the id of the stack's fleet; empty while the stack is created or destroyed."""
    call, name = quick_client("ssm").get_parameter, settings.fleet_parameter
    found = answer_or_none(call, "ParameterNotFound", Name=name)
    return str(found["Parameter"]["Value"]) if found else ""


@dataclass(frozen=True, slots=True)
class StackFleet(ABC):
    """A fleet by its id: how much it is to keep, and the two ways to stop it."""

    ends_what_it_loses: ClassVar[bool] = False  # a machine whose pool is no longer offered
    id: str

    @staticmethod
    def of(fleet_id: str) -> "StackFleet":
        """Return the fleet of this id, as the stack's parameter has it."""
        return SpotFleet(fleet_id) if fleet_id.startswith("sfr-") else ScalingGroups(fleet_id)

    @property
    @abstractmethod
    def end_command(self) -> str:
        """The command with which a person ends it and its instances."""

    @abstractmethod
    def read_capacity(self) -> tuple[int, int]:
        """Return how many instances the fleet is to keep, and how many of them on demand.

        A fleet that is cancelled or gone keeps none.
        """

    @abstractmethod
    def set_capacity(self, capacity: int, on_demand: int) -> None:
        """Request `capacity` instances, `on_demand` of them on demand.

        Above zero, it leaves an on-demand instance alone that is no longer requested.
        """

    @abstractmethod
    def send_to_zero(self) -> None:
        """Set the fleet's capacity to zero, on Spot and on demand."""

    @abstractmethod
    def cancel(self) -> None:
        """End the fleet for good, and its instances; their trainers save, as at every shutdown."""

    def is_new(self) -> bool:
        """Whether nobody has requested a machine since it was created or updated by a deploy."""
        return False  # a Spot fleet requests its machine from the start

    def keep_launching(self) -> None:
        """Make it go on trying for a machine, after hours without capacity."""
        return  # a Spot fleet does

    @abstractmethod
    def offer(self, pools: Sequence[tuple[str, str]]) -> None:
        """Let it start machines of these sizes in these subnets only."""

    def let_go(self) -> None:
        """Keep no on-demand instance that is not requested: the caller terminates it."""
        return  # a Spot fleet replaces what it requests, and nothing else


class SpotFleet(StackFleet):
    """A Spot fleet of type maintain. Spot instances that it no longer wants get a notice."""

    __slots__ = ()

    @property
    def end_command(self) -> str:
        return (
            "aws ec2 cancel-spot-fleet-requests --terminate-instances --spot-fleet-request-ids "
            f"{self.id}"
        )

    def read_capacity(self) -> tuple[int, int]:
        call = quick_client("ec2").describe_spot_fleet_requests
        gone = "InvalidSpotFleetRequestId.NotFound"
        found = answer_or_none(call, gone, SpotFleetRequestIds=[self.id]) or {}
        for fleet in found.get("SpotFleetRequestConfigs", ()):
            if fleet["SpotFleetRequestState"] in ("submitted", "active", "modifying"):
                config = fleet["SpotFleetRequestConfig"]
                return int(config["TargetCapacity"]), int(config.get("OnDemandTargetCapacity") or 0)
        return 0, 0

    def set_capacity(self, capacity: int, on_demand: int) -> None:
        quick_client("ec2").modify_spot_fleet_request(
            SpotFleetRequestId=self.id, TargetCapacity=capacity, OnDemandTargetCapacity=on_demand
        )

    def send_to_zero(self) -> None:
        self.set_capacity(0, 0)

    def cancel(self) -> None:
        answer = quick_client("ec2").cancel_spot_fleet_requests(
            SpotFleetRequestIds=[self.id], TerminateInstances=True
        )
        for each in answer.get("UnsuccessfulFleetRequests", []):
            raise NotCancelledError(f"({each['Error']['Code']}) {each['Error']['Message']}")

    def offer(self, pools: Sequence[tuple[str, str]]) -> None:
        ec2 = quick_client("ec2")
        found = ec2.describe_spot_fleet_requests(SpotFleetRequestIds=[self.id])
        config = found["SpotFleetRequestConfigs"][0]["SpotFleetRequestConfig"]
        template = config["LaunchTemplateConfigs"][0]["LaunchTemplateSpecification"]
        overrides = [{"InstanceType": size, "SubnetId": subnet} for size, subnet in pools]
        ec2.modify_spot_fleet_request(
            SpotFleetRequestId=self.id,
            LaunchTemplateConfigs=[
                {"LaunchTemplateSpecification": template, "Overrides": overrides}
            ],
        )


class ScalingGroups(StackFleet):
    """Two Auto Scaling groups, each of at most one machine: one on Spot, one on demand.

    They begin empty. A group ends what it no longer wants at once and without a notice. MinSize is
    how much of the desired capacity is no longer requested, but stays until it is ended.
    """

    __slots__ = ()
    ends_what_it_loses = True

    @property
    def groups(self) -> tuple[str, str]:
        """The names of the group on Spot and of that on demand."""
        return self.id, self.id + ON_DEMAND_GROUP

    @property
    def end_command(self) -> str:
        delete = "aws autoscaling delete-auto-scaling-group --force-delete"
        return "; ".join(f"{delete} --auto-scaling-group-name {each}" for each in self.groups)

    def read_capacity(self) -> tuple[int, int]:
        spot, on_demand = (
            each["DesiredCapacity"] - each["MinSize"] if each else 0 for each in self._described()
        )
        return spot + on_demand, on_demand

    def set_capacity(self, capacity: int, on_demand: int) -> None:
        on_spot, other = self.groups
        _, described = self._described()
        there = [
            each
            for each in (described or {}).get("Instances", ())
            if each["LifecycleState"].startswith(PRESENT)
        ]
        stays = int(bool(there) and not on_demand)
        _resize(other, at_least=stays, desired=on_demand + stays)
        _resize(on_spot, desired=capacity - on_demand)

    def send_to_zero(self) -> None:
        for each in self.groups:
            _resize(each, desired=0, at_most=0)

    def cancel(self) -> None:
        call = quick_client("autoscaling").delete_auto_scaling_group
        for each in self.groups:
            _unless_gone(call, AutoScalingGroupName=each, ForceDelete=True)

    def is_new(self) -> bool:
        on_spot, _ = self._described()
        return on_spot is not None and on_spot["MaxSize"] == NEW_GROUP

    def keep_launching(self) -> None:
        # AWS suspends the launches of a group that had none for a day; what a person suspended
        # stays so.
        for group in filter(None, self._described()):
            for process in group["SuspendedProcesses"]:
                if not process.get("SuspensionReason", "").startswith("User suspended"):
                    quick_client("autoscaling").resume_processes(
                        AutoScalingGroupName=group["AutoScalingGroupName"],
                        ScalingProcesses=[process["ProcessName"]],
                    )

    def offer(self, pools: Sequence[tuple[str, str]]) -> None:
        # Sizes stay: the Guard's role may not pass a launch template.
        subnets = ",".join(dict.fromkeys(subnet for _, subnet in pools))
        call = quick_client("autoscaling").update_auto_scaling_group
        _unless_gone(call, AutoScalingGroupName=self.id, VPCZoneIdentifier=subnets)

    def let_go(self) -> None:
        _, other = self._described()
        if other and other["MinSize"]:
            wanted = other["DesiredCapacity"] - other["MinSize"]
            _resize(other["AutoScalingGroupName"], desired=wanted)

    def _described(self) -> Iterator[dict[str, Any] | None]:
        """Yield each group as AWS describes it; None if it is gone or being deleted."""
        found = quick_client("autoscaling").describe_auto_scaling_groups(
            AutoScalingGroupNames=list(self.groups)
        )
        kept = {
            each["AutoScalingGroupName"]: each
            for each in found["AutoScalingGroups"]
            if not each.get("Status")  # set only while it is deleted
        }
        return (kept.get(each) for each in self.groups)


def _resize(group: str, *, desired: int, at_least: int = 0, at_most: int = 1) -> None:
    call = quick_client("autoscaling").update_auto_scaling_group
    sizes = {"MinSize": at_least, "MaxSize": at_most, "DesiredCapacity": desired}
    _unless_gone(call, AutoScalingGroupName=group, **sizes)


def _unless_gone(call: Callable[..., Any], **request: Any) -> None:
    """Make a call about a group; one that does not exist needs none."""
    try:
        call(**request)
    except ClientError as error:
        # Auto Scaling has no code of its own for it: "AutoScalingGroup name not found - ...".
        if "name not found" not in error.response["Error"]["Message"]:
            raise


def refusal_of(call: Callable[[], None]) -> str:
    """Make a call; return AWS's refusal, empty without one. Errors that may pass are raised."""
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
