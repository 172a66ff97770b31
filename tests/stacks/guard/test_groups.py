"""A fleet of two groups on the embedded AWS: what it requests, what stays, the ways to zero."""

import json
from typing import Any

import pytest
from aws_cdk import Stack
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk.assertions import Template

from contract.stack_names import NEW_GROUP, ON_DEMAND_GROUP
from embedded_aws.capacity import Course
from embedded_aws.fleet import CAPACITY
from rehearsal.alarms.evaluation import Alarm, evaluate
from stacks.fleet import KINDS
from stacks.guard.fleet import ON_DEMAND, SPOT, StackFleet, instances_of_stack
from stacks.guard.records import read_ledger
from stacks.guard.settings import GuardSettings, quick_client
from stacks.monitoring.metrics import RunMetrics
from tests.stacks.guard.scene import TAGS, Scene
from tests.stacks.templates import only

NAME = "TrainingStack-run-1"


@pytest.fixture
def fleet(scene: Scene) -> StackFleet:
    """Both groups, as CloudFormation makes them."""
    (template,) = quick_client("ec2").describe_launch_templates()["LaunchTemplates"]
    version = {"LaunchTemplateId": template["LaunchTemplateId"], "Version": "1"}
    for suffix, most, percent in (("", NEW_GROUP, 0), (ON_DEMAND_GROUP, 1, 100)):
        share = {"OnDemandBaseCapacity": 0, "OnDemandPercentageAboveBaseCapacity": percent}
        quick_client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=NAME + suffix,
            MinSize=0,
            MaxSize=most,
            MixedInstancesPolicy={
                "LaunchTemplate": {"LaunchTemplateSpecification": version},
                "InstancesDistribution": share,
            },
            VPCZoneIdentifier=quick_client("ec2").describe_subnets()["Subnets"][0]["SubnetId"],
            Tags=[{**each, "PropagateAtLaunch": True} for each in TAGS],
        )
    return StackFleet.of(NAME)


def settings(scene: Scene) -> GuardSettings:
    return GuardSettings.from_environment(scene.variables)


def markets(scene: Scene) -> list[str]:
    """The markets of the groups' machines, after the groups had their time."""
    for each in CAPACITY[0].fleets:
        each.reach_target()
    found = instances_of_stack(settings(scene))
    return sorted(each.market for each in found if each.is_live and each.fleet_id == NAME)


def _is_the_stacks(scene: Scene) -> None:
    StackFleet.of(scene.fleet_id).cancel()
    quick_client("ssm").put_parameter(
        Name="/TrainingStack/fleet-id", Value=NAME, Type="String", Overwrite=True
    )


def _missing() -> float | None:
    """What the alarm FleetBelowTarget makes of the groups' metrics."""
    kind, names = KINDS["asg"], [NAME, NAME + ON_DEMAND_GROUP]
    given = {"stack_name": "s", "guard_name": "g", "clock_name": "c"}
    metrics = RunMetrics(kind=kind, fleet_members=names, **given)
    stack = Stack()
    cloudwatch.Alarm(stack, "A", metric=metrics.missing_capacity, threshold=1, evaluation_periods=1)
    template = Template.from_stack(stack).to_json()
    alarm = Alarm.from_properties("A", only(template, "AWS::CloudWatch::Alarm"))
    described = quick_client("autoscaling").describe_auto_scaling_groups(
        AutoScalingGroupNames=names
    )
    published = {
        (group["AutoScalingGroupName"], name): value
        for group in described["AutoScalingGroups"]
        for name, value in (
            ("GroupDesiredCapacity", group["DesiredCapacity"]),
            ("GroupMinSize", group["MinSize"]),
            ("GroupInServiceInstances", len(group["Instances"])),
        )
    }
    values = {}
    for name, each in alarm.statistics.items():
        ((_, member),) = each.metric.dimensions
        values[name] = float(published[member, each.metric.name])
    return evaluate(alarm.expression, values)


def test_a_new_fleet_is_empty_until_its_machine_is_requested(
    scene: Scene, fleet: StackFleet
) -> None:
    assert (fleet.is_new(), fleet.read_capacity(), markets(scene)) == (True, (0, 0), [])
    fleet.set_capacity(1, 0)
    assert (fleet.is_new(), fleet.read_capacity(), markets(scene)) == (False, (1, 0), [SPOT])
    fleet.send_to_zero()
    assert (fleet.is_new(), fleet.read_capacity(), markets(scene)) == (False, (0, 0), [])


def test_an_on_demand_machine_stays_until_it_is_ended_and_is_not_replaced(
    scene: Scene, fleet: StackFleet
) -> None:
    fleet.set_capacity(1, 0)
    fleet.set_capacity(2, 1)
    assert (fleet.read_capacity(), markets(scene)) == ((2, 1), [ON_DEMAND, SPOT])
    fleet.set_capacity(1, 1)
    assert (fleet.read_capacity(), markets(scene)) == ((1, 1), [ON_DEMAND])
    fleet.set_capacity(1, 0)
    assert (fleet.read_capacity(), markets(scene)) == ((1, 0), [ON_DEMAND, SPOT])
    (other,) = [each for each in instances_of_stack(settings(scene))
                if each.is_live and each.market == ON_DEMAND and each.fleet_id == NAME]  # fmt: skip
    other.terminate()
    assert (fleet.read_capacity(), markets(scene)) == ((1, 0), [SPOT])
    # What is requested is replaced.
    fleet.set_capacity(1, 1)
    assert markets(scene) == [ON_DEMAND]
    (other,) = [each for each in instances_of_stack(settings(scene))
                if each.is_live and each.fleet_id == NAME]  # fmt: skip
    other.terminate()
    assert (fleet.read_capacity(), markets(scene)) == ((1, 1), [ON_DEMAND])


def test_a_deleted_fleet_keeps_none_and_may_be_ended_twice(scene: Scene, fleet: StackFleet) -> None:
    fleet.set_capacity(1, 0)
    for _ in range(2):
        fleet.cancel()
    fleet.send_to_zero()
    assert (fleet.is_new(), fleet.read_capacity(), markets(scene)) == (False, (0, 0), [])


def test_a_group_is_resumed_unless_a_person_suspended_it(
    fleet: StackFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, resumed = quick_client("autoscaling"), list[Any]()
    described = client.describe_auto_scaling_groups(AutoScalingGroupNames=[NAME])
    (group,) = described["AutoScalingGroups"]
    reasons = {"Launch": "No successful launch for a day", "Terminate": "User suspended at noon"}
    group["SuspendedProcesses"] = [
        {"ProcessName": name, "SuspensionReason": why} for name, why in reasons.items()
    ]
    monkeypatch.setattr(client, "describe_auto_scaling_groups", lambda **_: described)
    monkeypatch.setattr(client, "resume_processes", lambda **given: resumed.append(given))
    fleet.keep_launching()
    assert resumed == [{"AutoScalingGroupName": NAME, "ScalingProcesses": ["Launch"]}]


def test_a_zone_that_took_two_machines_rests_while_no_machine_runs(
    scene: Scene, fleet: StackFleet
) -> None:
    _is_the_stacks(scene)
    found = quick_client("ec2").describe_subnets()["Subnets"][:2]
    first, second = (each["SubnetId"] for each in found)
    scene.variables["SUBNETS"] = f"{first},{second}"
    scene.variables["HEARTBEAT_TIMEOUT_SECONDS"] = "36000"
    scene.variables["USD_PER_HOUR"] = json.dumps({"g5.xlarge": {"spot": 0.4, "on-demand": 1.0}})

    def zones() -> str:
        described = quick_client("autoscaling").describe_auto_scaling_groups(
            AutoScalingGroupNames=[NAME]
        )
        return str(described["AutoScalingGroups"][0]["VPCZoneIdentifier"])

    def lose() -> None:
        assert markets(scene) == [SPOT]
        scene.tick()
        scene.take_back(*scene.live())

    scene.tick()
    lose()
    lose()
    # A group ends a machine whose zone it loses: it already has the next one.
    assert markets(scene) == [SPOT]
    scene.tick()
    assert zones() == first
    # EC2's event reaches the Guard before the group replaces the machine.
    scene.take_back(*scene.live())
    scene.tick()
    assert zones() == second
    scene.tick(hours_later=2.5)
    assert sorted(zones().split(",")) == sorted([first, second])


def test_the_guard_starts_it_falls_back_to_on_demand_and_returns_to_spot(
    scene: Scene, fleet: StackFleet
) -> None:
    _is_the_stacks(scene)
    plan = {"stages": {"head": 3600.0}, "restart_seconds": 180.0, "save_seconds": 15.0}
    deadline = {
        "DEADLINE_HOURS": 1.5,
        "CALL_EVERY_SECONDS": 180,
        "FORECAST": json.dumps({**plan, "interval_seconds": 300.0}),
    }

    def called(hours: float, spot: int, seconds_left: float) -> tuple[str, list[str]]:
        CAPACITY[0].follow([Course(steps=((0, spot),))])
        newest = {"name": "00000010-g0001-a", "stage": "head", "seconds_left": seconds_left}
        scene.write("head.json", {"state": "running", "checkpoints": [newest]})
        markets(scene)
        action = scene.tick(hours_later=hours, **deadline)["action"]
        return action, markets(scene)

    assert called(0.01, 1, 3600) == ("start", [SPOT])
    assert called(0.02, 0, 3600) == ("none", [])
    assert called(0.2, 0, 3600) == ("market", [ON_DEMAND])
    # It is no longer requested, and stays until Spot is there.
    assert called(0.21, 0, 3600) == ("market", [ON_DEMAND])
    assert fleet.read_capacity() == (1, 0)
    assert _missing() == 0
    assert called(0.33, 1, 2600) == ("market", [SPOT])
    assert called(0.34, 1, 2600) == ("none", [SPOT])
    scene.write("head.json", {"state": "finished", "checkpoints": []})
    assert scene.tick(hours_later=0.4, **deadline)["action"] == "to-zero"
    assert (markets(scene), fleet.read_capacity(), fleet.is_new()) == ([], (0, 0), False)


def test_a_deploy_that_changes_the_on_demand_base_moves_the_run(
    scene: Scene, fleet: StackFleet
) -> None:
    """The template of groups has no base: only the Guard requests machines of them."""
    _is_the_stacks(scene)
    scene.write("head.json", {"state": "running", "checkpoints": []})

    def called(hours: float, base: int) -> tuple[str, list[str]]:
        markets(scene)
        given = {"ON_DEMAND_BASE": base, "MAX_BARREN_ATTEMPTS": 9}
        return scene.tick(hours_later=hours, **given)["action"], markets(scene)

    assert called(0.01, 0) == ("start", [SPOT])
    assert called(0.2, 1) == ("market", [ON_DEMAND])
    assert called(0.3, 1) == ("none", [ON_DEMAND])
    ledger, _ = read_ledger(settings(scene))
    assert [each.is_taken_back for each in ledger.attempts.values()][1:] == [True, False]
    # It trains until Spot is there.
    assert called(0.4, 0) == ("market", [ON_DEMAND, SPOT])
    # Seed 240661: a deploy of another launch template sets its MinSize to 0: two were wanted.
    groups = quick_client("autoscaling")
    groups.update_auto_scaling_group(AutoScalingGroupName=f"{fleet.id}.on-demand", MinSize=0)
    assert fleet.read_capacity() == (2, 1)
    assert called(0.41, 0) == ("market", [ON_DEMAND, SPOT])
    assert fleet.read_capacity() == (1, 0)
    called(0.42, 0)
    assert called(0.6, 0) == ("terminate", [SPOT])
    # What a person chooses since then stays.
    fleet.set_capacity(1, 1)
    assert called(0.7, 0) == ("none", [ON_DEMAND])


def test_a_deploy_that_drops_a_deadline_for_a_base_moves_the_run(
    scene: Scene, fleet: StackFleet
) -> None:
    """Both at once are refused, so that a run with a deadline has no base until then."""
    _is_the_stacks(scene)
    plan = {"stages": {"head": 3600.0}, "restart_seconds": 180.0, "save_seconds": 15.0}
    forecast = json.dumps({**plan, "interval_seconds": 300.0})
    given = {"MAX_BARREN_ATTEMPTS": 9, "CALL_EVERY_SECONDS": 180, "FORECAST": forecast}
    scene.write("head.json", {"state": "running", "checkpoints": []})

    def called(hours: float, **more: float) -> tuple[str, list[str]]:
        markets(scene)
        return scene.tick(hours_later=hours, **given, **more)["action"], markets(scene)

    assert called(0.01, ON_DEMAND_BASE=0, DEADLINE_HOURS=9) == ("start", [SPOT])
    assert called(0.02, ON_DEMAND_BASE=0, DEADLINE_HOURS=9) == ("none", [SPOT])
    assert called(0.2, ON_DEMAND_BASE=1, DEADLINE_HOURS=0) == ("market", [ON_DEMAND])
