"""The rehearsal's fleet: a machine for every instance that the embedded EC2 runs.

EC2 decides which instances exist, and the machines follow. An instance that EC2 takes back gets a
notice in the metadata and on the event bus and, when its time is up, SIGKILL to all its processes;
one that is terminated by an API call shuts down in order.
"""

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from embedded_aws import EmbeddedAws, EventBus
from rehearsal.machines.machine import new_lines
from rehearsal.machines.metadata import RehearsedInstance
from rehearsal.machines.nspawn.machine import NspawnMachine
from rehearsal.machines.process import ProcessMachine

# EC2 gives it to the instances of a Spot fleet; those of Auto Scaling groups have another.
FLEET_TAG = "aws:ec2spot:fleet-request-id"
_TEMPLATE_TAG = "aws:ec2launchtemplate"
# How long EC2 waits for an operating system to shut down is undocumented; it is some minutes.
_SHUTDOWN_SECONDS = 60.0
_TERMINATED = "terminated by an API call"
_STATE_CHANGE = "EC2 Instance State-change Notification"
POLL_SECONDS = 0.2
# The values of the stack's parameter `fleet`.
KINDS = ("spot", "asg")
# The MaxSize of a group since its deploy, until the Guard or a person requests its first machine.
_NEW = 2
# So many ticks after a deploy, the Guard has handled one that began after it.
_TICKS = 3
# A machine that boots an instance's user data: a process tree, or a container.
BootableMachine: TypeAlias = ProcessMachine | NspawnMachine


class RehearsalFailed(RuntimeError):
    """The end of a rehearsal before it was complete; the message says why."""


@dataclass(kw_only=True, slots=True)
class MachineLife:
    """One instance and its machine, from power-on to its end; times are monotonic."""

    instance: RehearsedInstance
    machine: BootableMachine
    started: float
    template_user_data: bytes
    reason: str | None = None
    ends_at: float | None = None
    ended: float | None = None
    processes_killed: int = 0
    latest: dict[str, Any] = field(default_factory=dict)  # its last metrics line of work
    noticed: dict[str, Any] = field(default_factory=dict)  # its metrics line when a notice came
    num_snapshots: int = 0  # committed by it
    first_progress: float | None = None  # seconds from power-on to its first metrics line of work
    first_step: float | None = None  # seconds from power-on to its first optimizer step
    bytes_read: int = 0  # from its metrics
    lines_relayed: int = 0  # from its log

    @property
    def seconds(self) -> float:
        """Seconds since power-on, or from power-on to the end."""
        return (self.ended or time.monotonic()) - self.started

    def read_metrics(self) -> None:
        """Read the trainer's new metrics lines from outside the machine."""
        for raw in new_lines(self.machine.metrics_file, self.bytes_read):
            self.bytes_read += len(raw)
            line = json.loads(raw)
            self.num_snapshots += line["kind"] == "commit"
            if line["kind"] == "notice":
                self.noticed = line
            if line["kind"] in ("step", "prepare"):
                self.latest = line
                self.first_progress = self.first_progress or self.seconds
            if line["kind"] == "step":
                self.first_step = self.first_step or self.seconds


def instances_of(aws: EmbeddedAws, *filters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the instances that EC2 runs and that match the filters, by id."""
    states = {"Name": "instance-state-name", "Values": ["pending", "running"]}
    found = aws.client("ec2").describe_instances(Filters=[states, *filters])
    return {
        item["InstanceId"]: item
        for reservation in found["Reservations"]
        for item in reservation["Instances"]
    }


def user_data_faults(lives: Sequence[MachineLife]) -> list[str]:
    """List the machines whose user data were not the launch template's, byte for byte."""
    return [
        f"{life.instance.id} ran other user data than the template's: {life.machine.user_data_file}"
        for life in lives
        if not _ran_no_other(life.machine, life.template_user_data)
    ]


def _ran_no_other(machine: BootableMachine, user_data: bytes) -> bool:
    file = machine.user_data_file
    if not file.exists():
        # A machine that ended early may not have any; one that has trained must have had some.
        return not machine.metrics_file.exists()
    return file.read_bytes() == user_data


@dataclass(kw_only=True, slots=True)
class Fleet:
    """Follows a stack's fleets of either kind; `step` does what is due and returns at once.

    `id` is the latest, a Spot fleet's or a group's name: a deploy that replaces the fleet starts
    the new one before ending the old.
    """

    aws: EmbeddedAws
    bus: EventBus
    id: str
    boot: Callable[[RehearsedInstance], BootableMachine]
    say: Callable[[str], None]
    stack: str
    lives: dict[str, MachineLife] = field(default_factory=dict)
    ticks: int = 0  # of the Guard's clock since the last deploy

    def step(self) -> None:
        """Let EC2 do what is due, then follow: power off machines, boot new instances' machines."""
        for event in self.aws.maintain_fleets():
            self.bus.publish(*event)
        alive = self.aws.running_instances(self.stack)
        for life in self.running():
            self._follow(life, is_alive=life.instance.id in alive)
        if new := alive - self.lives.keys():
            found = instances_of(self.aws, {"Name": "instance-id", "Values": sorted(new)})
            for instance_id, described in found.items():
                self._power_on(instance_id, described)

    def follow(
        self,
        is_over: Callable[[], bool],
        *,
        relay: Callable[[str], None],
        tick_seconds: float,
        timeout_seconds: float,
        logs: Path,
    ) -> None:
        """Step, relay the machines' logs and tick the Guard's clock until `is_over` is true."""
        next_tick = time.monotonic() + tick_seconds
        end = time.monotonic() + timeout_seconds
        while True:
            self.step()
            for life in self.lives.values():
                lines = life.machine.log_lines()
                for line in lines[life.lines_relayed :]:
                    relay(f"{life.instance.id}: {line}")
                life.lines_relayed = len(lines)
            if is_over():
                return
            if time.monotonic() >= next_tick and self.bus.is_idle:
                self.bus.tick()
                self.ticks += 1
                next_tick = time.monotonic() + tick_seconds
            if time.monotonic() > end:
                raise RehearsalFailed(
                    f"not finished after {timeout_seconds:g} s; the machines' logs are in {logs}"
                )
            time.sleep(POLL_SECONDS)

    @property
    def is_spot(self) -> bool:
        """Whether it is a Spot fleet, not Auto Scaling groups."""
        return self.id.startswith("sfr-")

    def running(self) -> list[MachineLife]:
        """Return the machines that are still running."""
        return [life for life in self.lives.values() if life.ended is None]

    def target_capacity(self) -> int:
        """Return how many instances the fleet is to maintain: 0 if it is cancelled.

        Of groups, all the stack's count, and as one machine those whose first nobody requested,
        unless the Guard's clock has called it since: it then has a reason not to.
        """
        if not self.is_spot:
            of_stack = [{"Name": "tag:Stack", "Values": [self.stack]}]
            groups = self.aws.client("autoscaling").describe_auto_scaling_groups(Filters=of_stack)
            sizes = [(e["DesiredCapacity"], e["MaxSize"]) for e in groups["AutoScalingGroups"]]
            is_early = self.ticks < _TICKS
            return sum(desired or (is_early and most == _NEW) for desired, most in sizes)
        answer = self.aws.client("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=[self.id])
        found = answer["SpotFleetRequestConfigs"][0]
        if found["SpotFleetRequestState"] != "active":
            return 0
        return int(found["SpotFleetRequestConfig"]["TargetCapacity"])

    def is_over(self) -> bool:
        """Whether no machine runs and none will start."""
        return not self.running() and self.target_capacity() == 0

    def interrupt(self, life: MachineLife, *, notice: bool, seconds: float | None = None) -> None:
        """Take an instance away, with a notice (of `seconds`, if set) or without (SIGKILL now)."""
        reason = "interrupted with a notice" if notice else "killed without a notice"
        capacity = self.aws.capacity
        usual = capacity.notice_seconds
        capacity.notice_seconds = usual if seconds is None else seconds
        capacity.end(life.instance.id, reason, has_notice=notice)
        if notice:
            self._announce(life, reason)
        else:
            life.reason = reason
            self._power_off(life)
        capacity.notice_seconds = usual

    def skip_notice(self, life: MachineLife) -> None:
        """End a machine's notice now; do nothing if it has none."""
        endings = self.aws.capacity.endings
        ending = endings.get(life.instance.id)
        if ending is not None and ending.has_notice:
            endings[life.instance.id] = replace(ending, ends_at=self.aws.capacity.clock())

    def rebalance(self, life: MachineLife) -> None:
        """Send a rebalance recommendation: EC2 may take the instance back some day, or never."""
        life.machine.metadata.rebalance()
        self.aws.capacity.at_risk.add(life.instance.id)
        self._ec2_event("EC2 Instance Rebalance Recommendation", life.instance.id)

    def close(self) -> None:
        """Kill every machine at once."""
        for life in self.running():
            life.reason = life.reason or "rehearsal ended"
            life.processes_killed = life.machine.kill()
            life.ended = time.monotonic()
            self.aws.power_off(life.instance.id)

    def _follow(self, life: MachineLife, *, is_alive: bool) -> None:
        ending = self.aws.capacity.endings.get(life.instance.id)
        if ending is not None and ending.has_notice and life.ends_at is None:
            if ending.is_excess:
                self._fleet_event(life.instance, "termination_notified")
            self._announce(life, ending.reason)
        if is_alive:
            return
        if ending is not None and self.aws.capacity.clock() >= ending.ends_at:
            life.reason = life.reason or f"{ending.reason}, without a notice"
            self._power_off(life)
        elif life.reason != _TERMINATED:
            life.reason = _TERMINATED
            life.ends_at = time.monotonic() + _SHUTDOWN_SECONDS
            life.machine.shut_down()
            self.say(f"{life.instance.id} terminated: shutting down")
        elif life.machine.is_off or time.monotonic() >= (life.ends_at or 0.0):
            self._power_off(life)

    def _power_on(self, instance_id: str, found: dict[str, Any]) -> None:
        user_data = self.aws.client("ec2").describe_instance_attribute(
            InstanceId=instance_id, Attribute="userData"
        )["UserData"]["Value"]
        instance = RehearsedInstance(
            id=instance_id,
            type=found["InstanceType"],
            image_id=found["ImageId"],
            zone=found["Placement"]["AvailabilityZone"],
            user_data=base64.b64decode(user_data),
            tags={tag["Key"]: tag["Value"] for tag in found["Tags"]},
            # On-demand instances have no lifecycle.
            market=found.get("InstanceLifecycle", "on-demand"),
        )
        life = MachineLife(
            instance=instance,
            machine=self.boot(instance),
            started=time.monotonic(),
            template_user_data=self._template_user_data(instance.tags),
        )
        self.lives[instance_id] = life
        self.aws.capacity.powered.add(instance_id)
        life.machine.start()
        where = f"{instance.type} in {instance.zone}, {instance.market}"
        self.say(f"{instance_id} {where}, is booting its user data")
        self._fleet_event(instance, "launched")
        self._ec2_event(_STATE_CHANGE, instance_id, {"state": "running"})

    def _template_user_data(self, tags: Mapping[str, str]) -> bytes:
        versions = self.aws.client("ec2").describe_launch_template_versions(
            LaunchTemplateId=tags[f"{_TEMPLATE_TAG}:id"],
            Versions=[tags[f"{_TEMPLATE_TAG}:version"]],
        )["LaunchTemplateVersions"]
        return base64.b64decode(versions[0]["LaunchTemplateData"]["UserData"])

    def _announce(self, life: MachineLife, reason: str) -> None:
        seconds = self.aws.capacity.notice_seconds
        life.reason = reason
        life.ends_at = time.monotonic() + seconds
        life.machine.metadata.notice(seconds)
        detail = {"instance-action": "terminate"}
        self._ec2_event("EC2 Spot Instance Interruption Warning", life.instance.id, detail)
        self.say(f"{life.instance.id} {reason}: {seconds:g} s left")

    def _power_off(self, life: MachineLife) -> None:
        life.processes_killed = life.machine.kill()
        life.ended = time.monotonic()
        killed = f"SIGKILL to {life.processes_killed} processes"
        self.aws.power_off(life.instance.id)
        self.say(f"{life.instance.id} is gone ({life.reason}): {killed}")
        self._fleet_event(life.instance, "terminated")
        self._ec2_event(_STATE_CHANGE, life.instance.id, {"state": "terminated"})

    def _fleet_event(self, instance: RehearsedInstance, kind: str) -> None:
        """Send a Spot fleet's event; Auto Scaling sends its own."""
        fleet_id, aws = instance.tags.get(FLEET_TAG), self.aws
        if fleet_id is None:
            return
        pool = json.dumps({"instanceType": instance.type, "availabilityZone": instance.zone})
        self.bus.publish(
            "aws.ec2spotfleet",
            "EC2 Spot Fleet Instance Change",
            {"instance-id": instance.id, "description": pool, "sub-type": kind},
            [f"arn:aws:ec2:{aws.region}:{aws.account}:spot-fleet-request/{fleet_id}"],
        )

    def _ec2_event(
        self, kind: str, instance_id: str, more: Mapping[str, str] | None = None
    ) -> None:
        self.bus.publish("aws.ec2", kind, {"instance-id": instance_id, **(more or {})})
