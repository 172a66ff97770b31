"""The answers of EC2, S3, SNS and SSM to the Guard of a world: a function for each call."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.stacks.guard.world import HOUR, NOTICE_SECONDS, USERS, Machine, Market, World, error


@dataclass
class Service:
    world: World
    name: str

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        act = globals()[operation]

        def call(**request: Any) -> Any:
            self.world.allow(operation)
            answer = act(self.world, **request)
            if self.world.losing[operation] > 0:  # it was done, and nobody knows
                self.world.losing[operation] -= 1
                raise error("InternalError", operation, 500)
            return answer

        return call

    def get_paginator(self, operation: str) -> "Pages":
        return Pages(getattr(self, operation))


@dataclass
class Pages:
    call: Callable[..., Any]

    def paginate(self, **request: Any) -> Iterator[Any]:
        yield self.call(**request)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def describe_instances(world: World, Filters: list[Any]) -> Any:
    wanted = {each["Name"]: each["Values"] for each in Filters}
    found = []
    for machine in world.machines:
        if machine.ended is not None and world.now - machine.ended > HOUR:
            continue
        if "instance-id" in wanted and machine.id not in wanted["instance-id"]:
            continue
        if machine.tags.get("Stack") not in wanted.get("tag:Stack", [machine.tags.get("Stack")]):
            continue
        found.append(
            {
                "InstanceId": machine.id,
                "InstanceType": "g5.xlarge",
                "LaunchTime": _time(machine.launched),
                "State": {"Name": "running" if machine.is_live else "terminated"},
                "StateReason": {"Code": machine.why},
                **_when_ended(machine),
                "Placement": {"AvailabilityZone": "us-east-1a"},
                "Tags": [{"Key": key, "Value": value} for key, value in machine.tags.items()],
                **({"InstanceLifecycle": "spot"} if machine.market == "spot" else {}),
            }
        )
    return {"Reservations": [{"Instances": found}] if found else []}


def _when_ended(machine: Machine) -> dict[str, str]:
    """EC2 says when a machine was ended by somebody's call; of what Spot took, it says no time."""
    if machine.ended is None or machine.why != USERS:
        return {}
    return {"StateTransitionReason": f"User initiated ({_time(machine.ended):%F %T} GMT)"}


def describe_spot_fleet_requests(world: World, SpotFleetRequestIds: list[str]) -> Any:
    state = "cancelled_running" if world.is_cancelled else "active"
    config = {"TargetCapacity": world.target, "OnDemandTargetCapacity": world.on_demand}
    return {
        "SpotFleetRequestConfigs": [
            {"SpotFleetRequestState": state, "SpotFleetRequestConfig": config}
        ]
    }


def modify_spot_fleet_request(
    world: World, SpotFleetRequestId: str, TargetCapacity: int, OnDemandTargetCapacity: int
) -> Any:
    world.target, world.on_demand = TargetCapacity, OnDemandTargetCapacity
    spot = [each for each in world.live if each.market == "spot" and each.ends is None]
    for machine in spot[TargetCapacity - OnDemandTargetCapacity :]:
        machine.ends, machine.why = world.now + NOTICE_SECONDS, USERS


def cancel_spot_fleet_requests(world: World, TerminateInstances: bool, **_: Any) -> Any:
    world.is_cancelled = True
    for machine in world.live if TerminateInstances else ():
        world.end(machine, USERS, saves=True)
    return {}


def _market(world: World, group: str) -> Market:
    """The market of a group that exists; Auto Scaling says in words that one does not."""
    market: Market = "on-demand" if group == f"{world.fleet_id}.on-demand" else "spot"
    if market in world.deleted:
        gone = error("ValidationError")
        gone.response["Error"]["Message"] = f"AutoScalingGroup name not found - {group}"
        raise gone
    return market


def describe_auto_scaling_groups(world: World, AutoScalingGroupNames: list[str]) -> Any:
    found = []
    for name in AutoScalingGroupNames:
        market: Market = "on-demand" if name.endswith(".on-demand") else "spot"
        least, most = world.sizes[market]
        desired = world.on_demand if market == "on-demand" else world.target - world.on_demand
        instances = [
            {"InstanceId": each.id, "LifecycleState": "InService"}
            for each in world.live
            if each.market == market
        ]
        if market not in world.deleted:
            found.append(
                {
                    "AutoScalingGroupName": name,
                    "MinSize": least,
                    "MaxSize": most,
                    "DesiredCapacity": desired,
                    "Instances": instances,
                    "SuspendedProcesses": [],
                }
            )
    return {"AutoScalingGroups": found}


def update_auto_scaling_group(
    world: World, AutoScalingGroupName: str, MinSize: int, MaxSize: int, DesiredCapacity: int
) -> Any:
    """A group ends at once, without a notice, what it no longer wants."""
    market = _market(world, AutoScalingGroupName)
    if not 0 <= MinSize <= DesiredCapacity <= MaxSize <= 1:
        raise error("ValidationError")
    world.sizes[market] = MinSize, MaxSize
    spot, on_demand = world.target - world.on_demand, world.on_demand
    if market == "spot":
        spot = DesiredCapacity
    else:
        on_demand = DesiredCapacity
    world.target, world.on_demand = spot + on_demand, on_demand
    for machine in [each for each in world.live if each.market == market][DesiredCapacity:]:
        world.end(machine, USERS, saves=True)


def delete_auto_scaling_group(world: World, AutoScalingGroupName: str, ForceDelete: bool) -> Any:
    market = _market(world, AutoScalingGroupName)
    least_most = {"MinSize": 0, "MaxSize": 0, "DesiredCapacity": 0}
    update_auto_scaling_group(world, AutoScalingGroupName, **least_most)
    world.deleted.add(market)
    world.is_cancelled = len(world.deleted) == len(world.sizes)


def terminate_instances(world: World, InstanceIds: list[str]) -> Any:
    for machine in world.live:
        if machine.id in InstanceIds:
            if not machine.is_seen:  # the Guard's role may end what has the stack's tag
                raise error("UnauthorizedOperation", status=403)
            world.end(machine, USERS, saves=True)


def describe_spot_price_history(world: World, **_: Any) -> Any:
    pool = {"InstanceType": "g5.xlarge", "AvailabilityZone": "us-east-1a"}
    return {
        "SpotPriceHistory": [
            {**pool, "SpotPrice": str(usd), "Timestamp": _time(when)}
            for when, usd in world.spot_prices[::-1]
        ]
    }


def get_parameter(world: World, Name: str) -> Any:
    return {"Parameter": {"Value": world.fleet_id}}


def publish(world: World, Message: str, **_: Any) -> None:
    world.mails.append(Message)


def get_object(world: World, Bucket: str, Key: str, VersionId: str = "") -> Any:
    versions = world.objects.get(Key, [])
    number = int(VersionId) if VersionId else len(versions) - 1
    if not versions or versions[number][1] is None:
        raise error("NoSuchKey", status=404)
    written, data = versions[number]
    assert data is not None
    found = {"Body": io.BytesIO(data), "ContentLength": len(data), "ETag": f'"{number}"'}
    return {**found, "LastModified": _time(written)}


def list_object_versions(world: World, Bucket: str, Prefix: str) -> Any:
    found = [
        {"Key": key, "VersionId": str(number), "LastModified": _time(written)}
        for key, versions in world.objects.items()
        for number, (written, data) in enumerate(versions)
        if key.startswith(Prefix) and data is not None
    ]
    return {"Versions": found[::-1]}


def list_objects_v2(
    world: World, Bucket: str, Prefix: str, StartAfter: str = "", MaxKeys: int = 1000
) -> Any:
    found = [
        {"Key": key, "LastModified": _time(versions[-1][0])}
        for key, versions in sorted(world.objects.items())
        if key.startswith(Prefix) and key > StartAfter and versions[-1][1] is not None
    ]
    return {"Contents": found}


def put_object(
    world: World,
    Bucket: str,
    Key: str,
    Body: bytes,
    IfMatch: str = "",
    IfNoneMatch: str = "",
    **_: Any,
) -> None:
    versions = world.objects.setdefault(Key, [])
    exists = bool(versions) and versions[-1][1] is not None
    if (IfNoneMatch and exists) or (IfMatch and IfMatch != f'"{len(versions) - 1}"'):
        raise error("PreconditionFailed", status=412)
    versions.append((world.now, Body))
