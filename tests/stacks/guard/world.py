"""EC2, S3, SNS and SSM as far as the Guard calls them, on a clock, with machines that misbehave."""

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from botocore.exceptions import ClientError

Habit = Literal["works", "hangs", "dies", "idles"]
PREFIX = "runs/run-1/"
FLEET = "sfr-1"
MINUTE, HOUR = 60.0, 3600.0
NOTICE_SECONDS = 120.0
BOOT_SECONDS = 300.0
COMMIT_SECONDS = 900.0
# Of machines that hang: until their last heartbeat; that die: until they end themselves.
HANG_SECONDS, DIE_SECONDS = 1500.0, 480.0
# The market of a world: dollars an hour.
ON_DEMAND_USD = 1.0
VOLUME_USD = 0.05


def error(code: str, operation: str = "Call", status: int = 400) -> ClientError:
    answer: Any = {
        "Error": {"Code": code, "Message": f"{code} said the model"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, operation)


@dataclass(kw_only=True)
class Machine:
    id: str
    market: Literal["spot", "on-demand"]
    habit: Habit
    launched: float
    ends: float | None = None  # when EC2 will have ended it
    ended: float | None = None
    why: str = ""  # EC2's StateReason, and whose doing it was
    tags: dict[str, str] = field(default_factory=dict)
    committed: float = 0.0

    @property
    def is_live(self) -> bool:
        return self.ended is None


@dataclass(kw_only=True)
class World:
    """One stack with its fleet; `advance` lets machines live, `client` answers the Guard."""

    now: float = 1_700_000_000.0
    target: int = 1
    on_demand: int = 0
    is_cancelled: bool = False
    has_capacity: bool = True
    spot_usd: float = 0.4
    habits: list[Habit] = field(default_factory=lambda: ["works"])
    machines: list[Machine] = field(default_factory=list)
    # Each object's versions, the newest last; None is a delete marker.
    objects: dict[str, list[tuple[float, bytes | None]]] = field(default_factory=dict)
    mails: list[str] = field(default_factory=list)
    denied: set[str] = field(default_factory=set)
    failing: Counter[str] = field(default_factory=Counter)  # the next calls of an operation
    state: str = "running"
    head_written: float = 0.0
    spent: float = 0.0
    calls: int = 0
    hour_of_work: float = 0.0

    # -- how time passes

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            step = min(MINUTE, end - self.now)
            self.now += step
            self._bill(step)
            for machine in self.live:
                self._live(machine)
            self._maintain()

    @property
    def live(self) -> list[Machine]:
        return [each for each in self.machines if each.is_live]

    def _bill(self, seconds: float) -> None:
        for machine in self.live:
            price = self.spot_usd if machine.market == "spot" else ON_DEMAND_USD
            self.spent += (price + VOLUME_USD) * seconds / HOUR

    def _live(self, machine: Machine) -> None:
        age = self.now - machine.launched
        if machine.ends is not None and self.now >= machine.ends:
            self.end(machine, machine.why)
        elif machine.habit == "dies" and age >= DIE_SECONDS:
            self.end(machine, "Client.InstanceInitiatedShutdown")
        elif self.state == "running" and age >= BOOT_SECONDS and self._beats(machine, age):
            self._beat(machine)

    def _beats(self, machine: Machine, age: float) -> bool:
        return machine.habit == "works" or (machine.habit == "hangs" and age < HANG_SECONDS)

    def _beat(self, machine: Machine) -> None:
        """The trainer's heartbeat, and a commit now and then."""
        began = max(machine.committed, machine.launched + BOOT_SECONDS)
        if machine.habit == "works" and self.now - began >= COMMIT_SECONDS:
            machine.committed = self.now
            self.commit()
        else:
            self.write_head()

    def commit(self) -> None:
        name = f"{int(self.now):08d}-g0001-0000000000000000"
        self.put(f"checkpoints/{name}/state.json", b"{}")
        self.write_head(name)

    def write_head(self, *names: str) -> None:
        found = self.get("head.json")
        before = json.loads(found)["checkpoints"] if found else []
        head = {"state": self.state, "nonce": str(self.now), "checkpoints": before}
        head["checkpoints"] = [*before, *({"name": each} for each in names)]
        self.put("head.json", json.dumps(head).encode())
        self.head_written = self.now

    def _maintain(self) -> None:
        wanted = 0 if self.is_cancelled else self.target
        if self.has_capacity and len(self.live) < wanted:
            market: Literal["spot", "on-demand"] = "on-demand" if self.on_demand else "spot"
            self.launch(market)

    def launch(self, market: Literal["spot", "on-demand"]) -> Machine:
        habit = self.habits.pop(0) if len(self.habits) > 1 else self.habits[0]
        tags = {"Stack": "TrainingStack", "RunId": "run-1", "aws:ec2spot:fleet-request-id": FLEET}
        machine = Machine(
            id=f"i-{len(self.machines):017x}",
            market=market,
            habit=habit,
            launched=self.now,
            tags=tags,
        )
        self.machines.append(machine)
        return machine

    def end(self, machine: Machine, why: str) -> None:
        machine.ended, machine.why = self.now, why

    # -- S3

    def put(self, name: str, data: bytes | None) -> None:
        self.objects.setdefault(PREFIX + name, []).append((self.now, data))

    def get(self, name: str) -> bytes | None:
        versions = self.objects.get(PREFIX + name)
        return versions[-1][1] if versions else None

    # -- what the Guard sees

    def client(self, service: str, **_: Any) -> "Service":
        return Service(self, service)

    def allow(self, operation: str) -> None:
        self.calls += 1
        if self.failing[operation] > 0:
            self.failing[operation] -= 1
            raise error("InternalError", operation, 500)
        if operation in self.denied:
            raise error("UnauthorizedOperation", operation, 403)


@dataclass
class Service:
    world: World
    name: str

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        act = globals()[f"_{operation}"]

        def call(**request: Any) -> Any:
            self.world.allow(operation)
            return act(self.world, **request)

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


def _describe_instances(world: World, Filters: list[Any]) -> Any:
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
                "Placement": {"AvailabilityZone": "us-east-1a"},
                "Tags": [{"Key": key, "Value": value} for key, value in machine.tags.items()],
                **({"InstanceLifecycle": "spot"} if machine.market == "spot" else {}),
            }
        )
    return {"Reservations": [{"Instances": found}] if found else []}


def _describe_spot_fleet_requests(world: World, SpotFleetRequestIds: list[str]) -> Any:
    state = "cancelled_running" if world.is_cancelled else "active"
    config = {"TargetCapacity": world.target, "OnDemandTargetCapacity": world.on_demand}
    return {
        "SpotFleetRequestConfigs": [
            {"SpotFleetRequestState": state, "SpotFleetRequestConfig": config}
        ]
    }


def _modify_spot_fleet_request(
    world: World, SpotFleetRequestId: str, TargetCapacity: int, OnDemandTargetCapacity: int
) -> Any:
    world.target, world.on_demand = TargetCapacity, OnDemandTargetCapacity
    for machine in [each for each in world.live if each.market == "spot"][TargetCapacity:]:
        machine.ends, machine.why = world.now + NOTICE_SECONDS, "Client.UserInitiatedShutdown"


def _cancel_spot_fleet_requests(world: World, TerminateInstances: bool, **_: Any) -> Any:
    world.is_cancelled = True
    for machine in world.live if TerminateInstances else ():
        world.end(machine, "Client.UserInitiatedShutdown")
    return {}


def _terminate_instances(world: World, InstanceIds: list[str]) -> Any:
    for machine in world.live:
        if machine.id in InstanceIds:
            world.end(machine, "Client.UserInitiatedShutdown")


def _describe_spot_price_history(world: World, **_: Any) -> Any:
    price = {"SpotPrice": str(world.spot_usd), "AvailabilityZone": "us-east-1a"}
    return {"SpotPriceHistory": [{**price, "InstanceType": "g5.xlarge"}]}


def _get_parameter(world: World, Name: str) -> Any:
    return {"Parameter": {"Value": FLEET}}


def _publish(world: World, Message: str, **_: Any) -> None:
    world.mails.append(Message)


def _get_object(world: World, Bucket: str, Key: str, VersionId: str = "") -> Any:
    versions = world.objects.get(Key, [])
    number = int(VersionId) if VersionId else len(versions) - 1
    if not versions or versions[number][1] is None:
        raise error("NoSuchKey", status=404)
    written, data = versions[number]
    assert data is not None
    return {"Body": io.BytesIO(data), "LastModified": _time(written), "ETag": f'"{number}"'}


def _list_object_versions(world: World, Bucket: str, Prefix: str) -> Any:
    found = [
        {"Key": key, "VersionId": str(number), "LastModified": _time(written)}
        for key, versions in world.objects.items()
        for number, (written, data) in enumerate(versions)
        if key.startswith(Prefix) and data is not None
    ]
    return {"Versions": found[::-1]}


def _list_objects_v2(world: World, Bucket: str, Prefix: str, StartAfter: str = "") -> Any:
    found = [
        {"Key": key, "LastModified": _time(versions[-1][0])}
        for key, versions in sorted(world.objects.items())
        if key.startswith(Prefix) and key > StartAfter and versions[-1][1] is not None
    ]
    return {"Contents": found}


def _put_object(
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
