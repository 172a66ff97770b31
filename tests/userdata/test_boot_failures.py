"""Boots that cannot succeed: each says why, marks the run failed and sends the fleet to zero."""

from rehearsal.machines import ProcessMachine
from rehearsal.machines.process import EC2_DISKS
from tests.userdata.rig import Rig, calls, wait

NO_PATIENCE = {"DISK_WAIT_SECONDS": "0", "FETCH_ATTEMPTS": "1"}


def reason_of_the_end(rig: Rig, machine: ProcessMachine) -> str:
    """Wait until the fleet is at zero; hold head and events to it; return the reason."""
    wait(machine, f"[ok] fleet {rig.fleet_id} to zero")
    assert rig.target_capacity() == 0
    head = rig.read("head.json")
    assert head["state"] == "failed"
    assert any(event["status"] == "failed" for event in rig.events())
    assert calls(machine, "run") == []
    return str(head["reason"])


def test_fails_on_unknown_and_missing_variables_by_their_names(rig: Rig) -> None:
    variables = rig.run_env(LEARNING_RATE="3", RECIPE=None)
    machine = rig.machine(variables=variables, environment=NO_PATIENCE)
    reason = reason_of_the_end(rig, machine)
    assert "unknown variable LEARNING_RATE" in reason
    assert "variable RECIPE is missing" in reason


def test_fails_without_a_data_volume_and_lists_what_is_there(rig: Rig) -> None:
    machine = rig.machine(disks=EC2_DISKS[1:], environment=NO_PATIENCE)
    reason = reason_of_the_end(rig, machine)
    assert "no EBS disk attached as sdf" in reason
    assert (
        "/dev/nvme1n1 (Amazon Elastic Block Store, vol00112233445566778, sda1, holds /)" in reason
    )


def test_fails_without_a_dataset_and_says_how_to_upload_one(rig: Rig) -> None:
    rig.order(run="wait", sync=3)
    machine = rig.machine(variables=rig.run_env(DATASET_WAIT_SECONDS="7"))
    reason = reason_of_the_end(rig, machine)
    assert "no s3://datasets/trajectory/manifest.json after 7 s" in reason
    assert "python -m training data upload DIR --dataset-uri s3://datasets/trajectory" in reason


def test_fails_without_a_bundle_with_an_event_and_the_fleet_at_zero(rig: Rig) -> None:
    variables = rig.run_env(BUNDLE_URI="s3://assets/missing.zip")
    machine = rig.machine(variables=variables, environment=NO_PATIENCE)
    wait(machine, "[failed] boot-fetch: no bootstrap started from s3://assets/missing.zip")
    wait(machine, f"[ok] fleet {rig.fleet_id} to zero")
    (event,) = rig.events()
    assert (event["name"], event["status"]) == ("boot-fetch", "failed")
    assert rig.target_capacity() == 0
