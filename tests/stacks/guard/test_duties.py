"""Instances that the Guard ends by itself: unwanted ones, and machines that could not end."""

import re

from stacks.guard.settings import quick_client
from tests.stacks.guard.scene import SPOT, Scene

OTHER_RUN = [{"Key": "Stack", "Value": "TrainingStack"}, {"Key": "RunId", "Value": "run-0"}]
# 120 s of notice, and as much again.
GRACE_HOURS = 240 / 3600


def test_an_instance_that_outlives_its_fleets_capacity_is_terminated(scene: Scene) -> None:
    left = scene.start()  # as on demand: no notice, and no end with the capacity
    scene.set_capacity(0)
    assert scene.tick()["action"] == "none"
    done = scene.tick(hours_later=GRACE_HOURS + 0.01)
    assert done["action"] == "terminate"
    assert done["reason"].startswith(f"{left}: its fleet ({scene.fleet_id}) has been at zero for 2")
    assert scene.live() == []
    (event,) = scene.events()
    assert (event["name"], event["about"], event["run_id"]) == ("terminated", left, "run-1")
    (mail,) = scene.mails()
    assert mail.startswith(f"Terminated {left} (g5.xlarge, on-demand): its fleet")
    assert "should have ended by itself" not in mail, "nobody but the Guard ends one on demand"


def test_a_notice_may_be_used_to_its_end(scene: Scene) -> None:
    left = scene.start(**SPOT)
    scene.set_capacity(0)
    scene.tick()
    assert scene.tick(hours_later=GRACE_HOURS - 0.01)["action"] == "none"
    # Wanted again in time: nothing happens to it.
    scene.set_capacity(1)
    scene.tick(hours_later=GRACE_HOURS)
    scene.set_capacity(0)
    assert scene.tick(hours_later=2 * GRACE_HOURS)["action"] == "none"
    assert left in scene.live()


def test_what_the_guard_stops_itself_gets_the_same_time(scene: Scene) -> None:
    left = scene.start()
    scene.head("finished")
    assert scene.tick()["action"] == "to-zero"
    assert left in scene.live()
    assert scene.tick(hours_later=GRACE_HOURS + 0.01)["action"] == "terminate"
    # A machine ends with its run.
    assert "It should have ended by itself" in scene.mails()[-1]


def test_a_silent_machine_on_demand_is_not_in_the_way_of_a_resume(scene: Scene) -> None:
    """It gets no notice that it could use: who resumed within minutes was stopped once more."""
    scene.end(*scene.live())
    hung = scene.start()
    scene.head("running")
    for hours in (0.0, 0.5, 0.9):
        assert scene.tick(hours_later=hours)["action"] == "none"
    done = scene.tick(hours_later=1.1)
    assert done["action"] == "to-zero, terminate"
    assert re.search(
        rf"{hung}: its fleet is at zero, and it was last heard 39\d\d s", done["reason"]
    )
    assert scene.live() == []


def test_an_instance_of_a_fleet_cancelled_by_hand_is_terminated(scene: Scene) -> None:
    (left,) = scene.live()
    quick_client("ec2").cancel_spot_fleet_requests(
        SpotFleetRequestIds=[scene.fleet_id], TerminateInstances=False
    )
    scene.tick()
    assert scene.live() == [left]
    assert scene.tick(hours_later=0.1)["action"] == "terminate"
    assert scene.live() == []


def test_an_instance_whose_fleet_is_gone_is_terminated(scene: Scene) -> None:
    quick_client("ssm").delete_parameter(Name="/TrainingStack/fleet-id")
    scene.set_capacity(0)
    left = scene.start()
    scene.tick()
    done = scene.tick(hours_later=0.1)
    assert done["reason"].startswith(f"{left}: its fleet (gone) has been at zero")


def test_what_an_older_run_left_behind_is_terminated_and_not_counted(scene: Scene) -> None:
    """A new run_id replaces the fleet; what its predecessor left is of the same stack."""
    request = quick_client("ec2").describe_spot_fleet_requests()["SpotFleetRequestConfigs"][0]
    config = {
        name: request["SpotFleetRequestConfig"][name]
        for name in ("IamFleetRole", "LaunchTemplateConfigs")
    }
    (own,) = scene.live()
    older = quick_client("ec2").request_spot_fleet(
        SpotFleetRequestConfig={**config, "TargetCapacity": 1}
    )["SpotFleetRequestId"]
    (left,) = set(scene.live()) - {own}
    quick_client("ec2").create_tags(Resources=[left], Tags=OTHER_RUN)
    scene.tick()
    assert scene.tick(hours_later=0.1)["action"] == "none", "its fleet wants it still"
    ec2 = quick_client("ec2")
    ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=[older], TerminateInstances=False)
    scene.tick(hours_later=0.2)
    assert scene.tick(hours_later=0.3)["reason"].startswith(f"{left}: its fleet ({older})")
    assert left not in scene.read("guard.json")["attempts"]
    assert scene.capacity() == len(scene.live()) == 1


def test_an_on_demand_instance_that_spot_replaced_is_terminated(scene: Scene) -> None:
    """As after a deploy with on_demand_base=0: the fleet starts a Spot instance next to it."""
    on_demand = scene.start()
    assert scene.tick()["action"] == "none"
    done = scene.tick(hours_later=GRACE_HOURS + 0.01)
    assert done["reason"].startswith(f"{on_demand}: its fleet has had Spot capacity in its place")
    assert "should have ended by itself" not in "".join(scene.mails())
    assert len(scene.live()) == scene.capacity() == 1


def test_the_on_demand_part_of_a_fleet_is_left_alone(scene: Scene) -> None:
    quick_client("ec2").modify_spot_fleet_request(
        SpotFleetRequestId=scene.fleet_id, TargetCapacity=1, OnDemandTargetCapacity=1
    )
    scene.tick()
    assert scene.tick(hours_later=0.5)["action"] == "none"
    assert len(scene.live()) == 1


def test_a_machine_that_failed_and_cannot_end_is_ended(scene: Scene) -> None:
    (machine,) = scene.live()
    scene.failed(machine, "CUDA error: no CUDA-capable device is detected")
    assert scene.tick(hours_later=0.03)["action"] == "none", "it may be ending by itself"
    done = scene.tick(hours_later=0.04)
    assert done["action"] == "terminate"
    assert "is still running: CUDA error: no CUDA-capable device" in done["reason"]
    assert machine not in scene.live()
    assert "It should have ended by itself" in scene.mails()[-1]
    # A maintain fleet replaces it, and the replacement is left alone.
    scene.set_capacity(1)
    assert scene.tick(hours_later=0.1)["action"] == "none"
    assert len(scene.live()) == 1


def test_an_instance_of_another_stack_is_nobodys_business(scene: Scene) -> None:
    foreign = scene.start(tags=[{"Key": "Stack", "Value": "OtherStack"}])
    scene.set_capacity(0)
    scene.tick()
    scene.tick(hours_later=1)
    assert scene.live() == [foreign]


def test_a_run_that_a_machine_gave_up_without_marking_it_is_told_once(scene: Scene) -> None:
    """As an older version, which cannot read the head: the fleet is at zero, and nobody says so."""
    (machine,) = scene.live()
    scene.head("released")
    scene.failed(machine, "head.json has format 6", name="head-not-marked")
    scene.set_capacity(0)
    assert scene.tick()["action"] == "none"
    (mail,) = scene.mails()
    assert mail.startswith(f"{machine} gave the run up, and could not mark it failed: head.json")
    assert "Then continue from the last commit: runs resume run-1" in mail
    scene.set_capacity(1)
    for later in (0.01, 0.5):
        scene.tick(hours_later=later)
    assert scene.capacity() == len(scene.mails()) == 1


def test_a_machine_that_came_and_gave_the_run_up_while_no_call_looked_is_told_of(
    scene: Scene,
) -> None:
    scene.head("released")
    scene.tick()
    scene.set_capacity(0)
    scene.failed("i-unseen", "head.json has format 6", name="head-not-marked")
    scene.tick(hours_later=2)
    assert scene.mails()[-1].startswith("i-unseen gave the run up")


def test_a_stopped_machine_is_ended_for_its_volumes(scene: Scene) -> None:
    """By a person's poweroff or AWS's retirement: one on demand stops, and its disks stay."""
    left = scene.start()
    scene.tick()
    quick_client("ec2").stop_instances(InstanceIds=[left])
    done = scene.tick(hours_later=0.02)
    assert done["reason"] == f"{left}: it is stopped, and its volumes are billed"
    (mail,) = scene.mails()
    assert mail.startswith(f"Terminated {left} (g5.xlarge, on-demand): it is stopped")
    assert "by itself" not in mail
    (found,) = quick_client("ec2").describe_instances(InstanceIds=[left])["Reservations"]
    assert found["Instances"][0]["State"]["Name"] == "terminated"
    assert scene.tick(hours_later=0.03)["action"] == "none"
