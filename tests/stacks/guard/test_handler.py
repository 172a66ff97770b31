"""One call of the Guard: what it stops, what it leaves alone, and whose events it heeds."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from moto.ec2.models import ec2_backends

from stacks.guard import duties, fleet, records
from stacks.guard import handler as guard
from stacks.guard.settings import GuardSettings, quick_client
from stacks.guard.tick import CALL_SECONDS
from tests.stacks.guard.scene import ACCOUNT, REGION, SPOT, TICK, Scene

EVENTS = (
    "EC2 Spot Instance Interruption Warning",
    "EC2 Instance Rebalance Recommendation",
)
NOTHING = {"action": "none", "reason": "no reason to stop"}


def _event(detail_type: str, instance_id: str) -> dict[str, Any]:
    detail = {"instance-id": instance_id, "instance-action": "terminate"}
    return {"source": "aws.ec2", "detail-type": detail_type, "detail": detail}


def test_a_run_in_good_health_is_left_alone(scene: Scene) -> None:
    scene.head("running", "00000010-g0001-a")
    assert scene.tick() == NOTHING
    assert scene.capacity() == 1
    assert scene.mails() == []


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_a_run_that_is_done_goes_to_zero(scene: Scene, state: str) -> None:
    scene.head(state)
    reason = {"finished": "the run is finished", "failed": "the run has failed"}[state]
    assert scene.tick() == {"action": "to-zero", "reason": reason}
    assert scene.capacity() == 0


def test_a_released_run_waits_for_its_replacement(scene: Scene) -> None:
    scene.head("released")
    scene.end(*scene.instances())
    # Without max_wait_hours, however long: nothing runs, so nothing costs.
    assert scene.tick(hours_later=30) == NOTHING
    assert scene.capacity() == 1


def test_billed_hours_are_capped(scene: Scene) -> None:
    scene.head("running")
    scene.tick()
    assert scene.tick(hours_later=72.5) == {
        "action": "to-zero",
        "reason": "72.5 hours billed; max_hours is 72",
    }
    assert scene.capacity() == 0


def test_billed_dollars_are_capped(scene: Scene) -> None:
    scene.head("running")
    scene.tick()
    limits: dict[str, Any] = {
        "MAX_USD": 3,
        "HEARTBEAT_TIMEOUT_SECONDS": 90_000,
        "STORAGE_USD_PER_HOUR": 0.05,
    }
    # The scene's Spot price is $0.45.
    assert scene.tick(hours_later=5.6, **limits)["action"] == "none"
    # Before the limit is passed, not after: the next call comes in 11 minutes.
    stopped = scene.tick(hours_later=5.9, **limits)
    assert stopped["action"] == "to-zero"
    assert stopped["reason"].endswith("more until the next call could end it; max_usd is 3")
    assert 2.7 < float(stopped["reason"].removeprefix("$").partition(" ")[0]) < 3


def test_a_machine_is_awaited_only_while_it_may_run_until_the_next_call(scene: Scene) -> None:
    scene.head("running")
    scene.tick()
    limits: dict[str, Any] = {"HEARTBEAT_TIMEOUT_SECONDS": 90_000, "STORAGE_USD_PER_HOUR": 0.05}
    assert scene.tick(hours_later=5.6, MAX_USD=9, **limits)["action"] == "none"
    scene.end(*scene.live())
    # $2.80 are billed; a machine that comes now may cost $0.14 until the next call, as planned.
    assert scene.tick(hours_later=5.7, MAX_USD=2.95, **limits)["action"] == "none"
    stopped = scene.tick(hours_later=5.8, MAX_USD=2.85, **limits)
    assert stopped["reason"].startswith("$2.80 billed, $0.14 more until the next call could")
    assert scene.capacity() == 0


def test_a_run_that_gets_no_instance_ends_with_that_sentence(scene: Scene) -> None:
    # The gaps between its calls are no hours without a look.
    known = {"MAX_WAIT_HOURS": 2, "HEARTBEAT_TIMEOUT_SECONDS": 36_000}
    scene.end(*scene.instances())
    scene.tick(**known)
    assert scene.tick(hours_later=1.9, **known) == NOTHING
    assert scene.tick(hours_later=2.1, **known) == {
        "action": "to-zero",
        "reason": "no instance for 2.1 hours; max_wait_hours is 2",
    }
    (mail,) = scene.mails()
    assert "with the run's options (DeployCommand, if the stack prints it) and more zones" in mail
    assert "Then continue from the last commit: runs resume run-1" in mail
    assert "--on-demand-target-capacity" not in mail
    # A stopped fleet waits for nothing; raised again, it waits anew.
    assert scene.tick(hours_later=9, **known) == NOTHING
    scene.set_capacity(1)
    scene.end(*scene.live())
    assert scene.tick(hours_later=10, **known) == NOTHING


def test_a_run_whose_instances_cannot_be_listed_is_not_said_to_have_none(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.end(*scene.instances())
    scene.tick(MAX_WAIT_HOURS=2)
    scene.maintain()

    def refused(_: GuardSettings) -> None:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(fleet, "instances_of_stack", refused)
        with pytest.raises(guard.GuardError, match="instances: TimeoutError"):
            scene.tick(hours_later=2.1, MAX_WAIT_HOURS=2)
    assert scene.capacity() == 1


def test_hours_of_instances_that_ec2_forgot_are_billed(scene: Scene) -> None:
    now = datetime.now(UTC).timestamp()
    gone = {"launched": now - 80 * 3600, "seen": now - 5 * 3600, "is_live": False}
    scene.write("guard.json", {"format": 1, "stopped": 0.0, "attempts": {"i-0gone": gone}})
    assert scene.tick()["reason"] == "75.0 hours billed; max_hours is 72"


def test_the_interval_in_which_a_spot_machine_ended_is_billed_at_its_spot_price(
    scene: Scene,
) -> None:
    scene.tick(hours_later=1)
    an_hour = scene.read("guard.json")["billed"]["spot"]["usd"]
    assert an_hour < 0.9, "the price list says 1.0 on demand"
    scene.set_capacity(0)
    assert scene.live() == [], "the only machine of its size"
    (ended,) = scene.instances()
    # As where EC2 does not say when: moto's time is not the scene's.
    ec2_backends[ACCOUNT][REGION].get_instance(ended)._reason = ""
    scene.tick(hours_later=2)
    billed = scene.read("guard.json")["billed"]["spot"]["usd"]
    assert billed == pytest.approx(2 * an_hour, rel=0.01)


def test_waiting_for_capacity_is_not_billed(scene: Scene) -> None:
    scene.tick()
    scene.end(*scene.instances())
    scene.tick(hours_later=1)
    assert scene.tick(hours_later=100) == NOTHING


def test_silence_goes_to_zero(scene: Scene) -> None:
    scene.head("running")
    scene.tick()
    assert scene.tick(hours_later=0.9) == NOTHING
    done = scene.tick(hours_later=1.1)
    assert done["action"] == "to-zero"
    assert done["reason"].startswith("no heartbeat for 39")


def test_an_instance_that_never_speaks_is_replaced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cloud-init that found no data source: no event, nothing but an instance that passes checks.
    monkeypatch.setattr(duties, "UNHEARD_SECONDS", 1500.0)
    scene.maintain()
    scene.head("released", "step-00012000")
    (mute,) = scene.live()
    writer = scene.start(**SPOT)
    scene.head("running", "step-00012000", writer=writer)
    spoke = scene.start(**SPOT)
    scene.write(f"events/20260101T000000.000000Z-{spoke}-boot-fetch.json", {})
    for hours in 0, 0.4:
        assert scene.tick(hours_later=hours) == NOTHING
    done = scene.tick(hours_later=0.45)
    assert (done["action"], done["reason"].partition(":")[0]) == ("terminate", mute)
    assert "its user data did not run, or it cannot reach S3" in done["reason"]
    assert (scene.capacity(), set(scene.live())) == (1, {writer, spoke})
    (mail,) = scene.mails()
    assert f"aws ec2 get-console-output --output text --instance-id {mute}" in mail
    assert "its user data did not run" in scene.read("guard.json")["attempts"][mute]["said"]


def test_attempts_that_commit_nothing_are_counted(scene: Scene) -> None:
    scene.end(scene.start(), scene.start())
    assert scene.tick() == NOTHING
    scene.end(scene.start())
    assert scene.tick() == {
        "action": "to-zero",
        "reason": "3 attempts in a row committed nothing",
    }


@pytest.mark.parametrize("code", ["Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"])
@pytest.mark.parametrize("deadline_hours", [0, 2])
def test_attempts_that_spot_takes_back_are_not_counted(
    scene: Scene, code: str, deadline_hours: int
) -> None:
    scene.take_back(*[scene.start(**SPOT) for _ in range(5)], code=code)
    assert scene.tick(DEADLINE_HOURS=deadline_hours) == NOTHING
    assert scene.capacity() == 1


def test_a_takeback_between_two_barren_attempts_neither_counts_nor_begins_a_new_count(
    scene: Scene,
) -> None:
    scene.end(scene.start(**SPOT), scene.start(**SPOT))
    scene.take_back(scene.start(**SPOT))
    assert scene.tick() == NOTHING
    scene.end(scene.start(**SPOT))
    assert scene.tick()["reason"] == "3 attempts in a row committed nothing"


def test_a_machine_whose_fleet_a_deploy_has_replaced_is_no_barren_attempt(scene: Scene) -> None:
    """Seed 132206: CloudFormation ends the machines of the fleet that it deletes."""
    ec2 = quick_client("ec2")
    (request,) = ec2.describe_spot_fleet_requests()["SpotFleetRequestConfigs"]
    config = {
        name: request["SpotFleetRequestConfig"][name]
        for name in ("IamFleetRole", "LaunchTemplateConfigs")
    }
    older = ec2.request_spot_fleet(SpotFleetRequestConfig={**config, "TargetCapacity": 1})
    scene.tick()
    fleets = [older["SpotFleetRequestId"]]
    ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=fleets, TerminateInstances=True)
    for _ in range(2):
        scene.end(scene.start(**SPOT))
    assert scene.tick(MAX_BARREN_ATTEMPTS=3) == NOTHING
    scene.end(scene.start(**SPOT))
    assert scene.tick(MAX_BARREN_ATTEMPTS=3)["action"] == "to-zero"


def test_a_barren_end_lists_the_message_of_each_machine(scene: Scene) -> None:
    machines = [scene.start() for _ in range(3)]
    scene.failed(machines[0], "boot-data-volume: no disk named sdf")
    scene.failed(machines[1], "an older word", hours_ago=0.5)
    scene.failed(machines[1], "CUDA error: uncorrectable ECC error")
    scene.end(*machines)
    scene.tick()
    (event,), (mail,) = scene.events(), scene.mails()
    assert event["message"] == "3 attempts in a row committed nothing"
    words = [line.partition("): ")[2] for line in event["said"]]
    assert words[:2] == [
        "boot-data-volume: no disk named sdf",
        "CUDA error: uncorrectable ECC error",
    ]
    assert words[2].startswith("no event machine-failed; EC2 says: ")
    assert all(line in mail and machines[at] in line for at, line in enumerate(event["said"]))


def test_a_key_that_spot_may_not_use_is_named_once(scene: Scene) -> None:
    """EC2 ends such machines within seconds; none of them can say anything."""
    machines = [scene.start(**SPOT) for _ in range(5)]
    scene.take_back(*machines, code="Client.InternalError")
    scene.tick(MAX_BARREN_ATTEMPTS=5)
    (event,), (mail,) = scene.events(), scene.mails()
    (report,) = event["said"]
    assert all(f"{each} (g5.xlarge, spot, 0 min)" in report for each in machines)
    assert report.endswith("EC2 says: Client.InternalError: no capacity")
    assert mail.count("EC2 says: Client.InternalError") == 1
    assert "service-linked roles may not use the key of the volumes" in mail


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("minutes", [5, 90])
def test_a_head_that_is_deleted_is_reported_as_missing_at_the_next_call(
    scene: Scene, is_saved: bool, minutes: int
) -> None:
    """Its trainer has lost the lease, and would idle for the time that a heartbeat may take."""
    scene.tick()  # a first machine that boots: no head yet, and none is missing
    if is_saved:
        scene.write("checkpoints/00000010-g0001-a/state.safetensors", {})
    scene.head("running", *["00000010-g0001-a"] * is_saved)
    assert scene.tick(hours_later=0.05) == NOTHING
    quick_client("s3").delete_object(Bucket="runs", Key="runs/run-1/head.json")
    missing = {"action": "to-zero", "reason": "head.json is missing, though the run has begun"}
    assert scene.tick(hours_later=minutes / 60) == missing
    (mail,) = scene.mails()
    assert "list-object-versions --bucket runs --prefix runs/run-1/head.json" in mail
    assert "delete-object --bucket runs --key runs/run-1/head.json --version-id ID" in mail


def test_a_head_that_is_missing_is_reported_once_whoever_ends_the_fleet(scene: Scene) -> None:
    """A trainer that begins without it ends the run, which it cannot mark as failed."""
    for _ in range(2):
        scene.write("checkpoints/00000010-g0001-a/state.safetensors", {})
        scene.head("running", "00000010-g0001-a")
        scene.set_capacity(1)
        assert scene.tick(hours_later=0.05) == NOTHING
        quick_client("s3").delete_object(Bucket="runs", Key="runs/run-1/head.json")
        scene.set_capacity(0)
        for _ in range(2):
            scene.tick(hours_later=0.1)
    mails = [each for each in scene.mails() if "head.json is missing" in each]
    assert len(mails) == 2


def test_a_run_whose_objects_were_all_deleted_may_begin_again(scene: Scene) -> None:
    scene.head("running")
    scene.tick(hours_later=-0.01)
    quick_client("s3").delete_object(Bucket="runs", Key="runs/run-1/head.json")
    scene.end(*scene.instances())
    scene.start()
    assert scene.tick() == NOTHING


def test_a_commit_ends_the_count(scene: Scene) -> None:
    scene.end(scene.start(), scene.start(), scene.start())
    scene.write("checkpoints/00000010-g0003-a/state.safetensors", {})
    scene.head("running", "00000005-g0002-a", "00000010-g0003-a")
    assert scene.tick() == NOTHING


def test_a_commit_that_was_dropped_still_ends_the_count(scene: Scene) -> None:
    """`reopen --from-checkpoint` goes back to one from before the latest attempts."""
    scene.end(scene.start(), scene.start(), scene.start())
    scene.write("checkpoints/00000010-g0003-a/state.safetensors", {})
    scene.head("running", "00000005-g0002-a", "00000010-g0003-a")
    scene.tick()
    scene.head("released", "00000005-g0002-a")
    assert scene.tick() == NOTHING


def test_a_deploy_after_a_stop_begins_a_new_count(scene: Scene) -> None:
    scene.end(scene.start(), scene.start(), scene.start())
    assert scene.tick()["action"] == "to-zero"
    scene.set_capacity(1)
    assert scene.tick() == NOTHING


def test_a_failed_run_that_is_taken_back_begins_a_new_count(scene: Scene) -> None:
    scene.end(scene.start(), scene.start(), scene.start())
    scene.set_capacity(0)  # by its machine
    scene.head("failed")
    assert scene.tick() == NOTHING
    scene.head("released")
    scene.set_capacity(1)
    assert scene.tick() == NOTHING


def test_a_stop_is_recorded_and_told_once(scene: Scene) -> None:
    scene.head("finished", nonce="abc")
    scene.tick()
    assert scene.tick() == NOTHING
    (event,) = scene.events()
    assert (event["message"], event["fleet_id"]) == ("the run is finished", scene.fleet_id)
    (mail,) = scene.mails()
    assert mail.startswith("Fleet to zero: the run is finished\n")
    assert "s3://runs/runs/run-1" in mail


def test_the_end_of_a_run_is_told_if_its_machine_stopped_the_fleet(scene: Scene) -> None:
    scene.set_capacity(0)
    scene.head("failed", nonce="abc", reason="the loss is not finite")
    assert scene.tick() == NOTHING
    scene.tick(hours_later=1)
    (mail,) = scene.mails()
    assert mail.startswith("The run has failed\n\nthe loss is not finite\n")
    assert "runs resume run-1" in mail
    assert scene.events() == []
    # Taken back, it may fail again, and that is reported again.
    scene.head("failed", nonce="def")
    scene.tick(hours_later=2)
    assert len(scene.mails()) == 2


@pytest.mark.parametrize("detail_type", EVENTS)
def test_events_of_own_instances_wake_it_and_are_nobodys_mail(
    scene: Scene, detail_type: str
) -> None:
    (instance_id,) = scene.instances()
    assert scene.tick(event=_event(detail_type, instance_id)) == NOTHING
    assert scene.mails() == []
    assert instance_id in scene.read("guard.json")["attempts"]


def test_a_stack_without_a_fleet_is_nothing_to_guard(scene: Scene) -> None:
    quick_client("ssm").delete_parameter(Name="/TrainingStack/fleet-id")
    assert scene.tick() == NOTHING


def test_lambda_calls_it_with_the_constructs_environment(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in scene.variables.items():
        monkeypatch.setenv(name, value)
    assert guard.handler(TICK, None) == NOTHING
    assert json.loads(capsys.readouterr().out)["action"] == "none"


def test_the_construct_sets_what_the_handler_reads(only: Any) -> None:
    variables = only("AWS::Lambda::Function")["Environment"]["Variables"]
    spelled = {name: value if isinstance(value, str) else "1" for name, value in variables.items()}
    settings = GuardSettings.from_environment(spelled)
    assert (settings.run_id, settings.notice_seconds) == ("run-1", 120)
    assert settings.usd_per_hour("g5.2xlarge", "on-demand") == 1.212
    # A size that a later deploy no longer offers is reckoned as the stack's own.
    assert settings.usd_per_hour("p9.old", "spot") == settings.usd_per_hour("g5.2xlarge", "spot")


def test_lambda_gives_it_the_time_that_a_call_may_take(only: Any) -> None:
    assert only("AWS::Lambda::Function")["Timeout"] == CALL_SECONDS


def test_machines_words_are_read_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.failed(scene.start(), "no GPU")
    scene.tick()
    since: list[float] = []

    def recorded(settings: GuardSettings, start: float) -> records.MachineEvents:
        since.append(start)
        return records.MachineEvents([], [], {})

    monkeypatch.setattr(records, "machine_events", recorded)
    scene.tick(hours_later=5)
    (start,) = since
    assert datetime.now(UTC).timestamp() - start == pytest.approx(
        records.CLOCKS_DIFFER_SECONDS, abs=60
    )
