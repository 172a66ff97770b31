"""The Guard's handler against moto's services: four reasons to stop, and what it passes on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.sns.models import sns_backends

from stacks.guard import handler as guard
from stacks.guard import ledger
from stacks.guard.settings import Settings, client

ACCOUNT, REGION = "123456789012", "us-east-1"
# One that moto knows without being told; it warns about others.
MOTOS_IMAGE = "ami-12c6146b"
TICK = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}
TAGS = [{"Key": "Stack", "Value": "TrainingStack"}, {"Key": "RunId", "Value": "run-1"}]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One run on moto: a fleet with one instance, a run bucket, a topic."""

    fleet_id: str
    topic_arn: str

    def tick(self, *, hours_later: float = 0, event: dict[str, Any] = TICK) -> dict[str, str]:
        settings = Settings.from_environment(
            {
                "STACK_NAME": "TrainingStack",
                "FLEET_PARAMETER": "/TrainingStack/fleet-id",
                "RUN_BUCKET": "runs",
                "RUN_PREFIX": "runs/run-1",
                "TOPIC_ARN": self.topic_arn,
                "MAX_BILLED_HOURS": "72",
                "HEARTBEAT_TIMEOUT_SECONDS": "3600",
                "MAX_BARREN_ATTEMPTS": "3",
            }
        )
        now = datetime.now(UTC).timestamp() + hours_later * 3600
        return guard.respond(settings, event, now)

    def write(self, name: str, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        client("s3").put_object(Bucket="runs", Key=f"runs/run-1/{name}", Body=body)

    def read(self, name: str) -> Any:
        answer = client("s3").get_object(Bucket="runs", Key=f"runs/run-1/{name}")
        return json.loads(answer["Body"].read())

    def instances(self) -> list[str]:
        pages = client("ec2").describe_instances()["Reservations"]
        return [each["InstanceId"] for page in pages for each in page["Instances"]]

    def start(self, tags: list[dict[str, str]] = TAGS) -> str:
        started = client("ec2").run_instances(
            ImageId=MOTOS_IMAGE,
            MinCount=1,
            MaxCount=1,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
        )
        return str(started["Instances"][0]["InstanceId"])

    def end(self, *instance_ids: str) -> None:
        client("ec2").terminate_instances(InstanceIds=list(instance_ids))

    def capacity(self) -> int:
        fleets = client("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=[self.fleet_id])
        (fleet,) = fleets["SpotFleetRequestConfigs"]
        return int(fleet["SpotFleetRequestConfig"]["TargetCapacity"])

    def messages(self) -> list[Any]:
        sent = sns_backends[ACCOUNT][REGION].topics[self.topic_arn].sent_notifications
        return [json.loads(message) for _, message, *_ in sent]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws():
        ec2 = client("ec2")
        client("s3").create_bucket(Bucket="runs")
        fleet_id = ec2.request_spot_fleet(
            SpotFleetRequestConfig={
                "IamFleetRole": f"arn:aws:iam::{ACCOUNT}:role/fleet",
                "TargetCapacity": 1,
                "AllocationStrategy": "priceCapacityOptimized",
                "LaunchSpecifications": [
                    {
                        "ImageId": MOTOS_IMAGE,
                        "InstanceType": "g5.xlarge",
                        "TagSpecifications": [{"ResourceType": "instance", "Tags": TAGS}],
                    }
                ],
            }
        )["SpotFleetRequestId"]
        client("ssm").put_parameter(Name="/TrainingStack/fleet-id", Value=fleet_id, Type="String")
        topic_arn = client("sns").create_topic(Name="notifications")["TopicArn"]
        yield Scene(fleet_id=fleet_id, topic_arn=topic_arn)


def _head(state: str, *names: str) -> dict[str, Any]:
    return {"format": 1, "state": state, "checkpoints": [{"name": name} for name in names]}


def _event(detail_type: str, instance_id: str) -> dict[str, Any]:
    detail = {"instance-id": instance_id, "instance-action": "terminate"}
    return {"source": "aws.ec2", "detail-type": detail_type, "detail": detail}


def test_a_run_in_good_health_is_left_alone(scene: Scene) -> None:
    scene.write("head.json", _head("running", "00000010-g0001-a"))
    assert scene.tick()["action"] == "none"
    assert scene.capacity() == 1
    assert scene.messages() == []


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_a_run_that_is_done_goes_to_zero(scene: Scene, state: str) -> None:
    scene.write("head.json", _head(state))
    assert scene.tick() == {"action": "to-zero", "reason": f"the run is {state}"}
    assert scene.capacity() == 0


def test_a_released_run_waits_for_its_replacement(scene: Scene) -> None:
    scene.write("head.json", _head("released"))
    scene.end(*scene.instances())
    # However long no capacity is to be had: nothing runs, so nothing costs.
    assert scene.tick(hours_later=30)["action"] == "none"
    assert scene.capacity() == 1


def test_billed_hours_are_capped(scene: Scene) -> None:
    scene.write("head.json", _head("running"))
    scene.tick()
    assert scene.tick(hours_later=72.5) == {
        "action": "to-zero",
        "reason": "72.5 hours billed; max_hours is 72",
    }
    assert scene.capacity() == 0


def test_hours_of_instances_that_ec2_forgot_are_billed(scene: Scene) -> None:
    now = datetime.now(UTC).timestamp()
    gone = {"launched": now - 80 * 3600, "seen": now - 5 * 3600, "is_live": False}
    scene.write("guard.json", {"format": 1, "stopped": 0.0, "attempts": {"i-0gone": gone}})
    assert scene.tick() == {
        "action": "to-zero",
        "reason": "75.0 hours billed; max_hours is 72",
    }


def test_waiting_for_capacity_is_not_billed(scene: Scene) -> None:
    scene.tick()
    scene.end(*scene.instances())
    scene.tick(hours_later=1)
    assert scene.tick(hours_later=100)["action"] == "none"


def test_silence_goes_to_zero(scene: Scene) -> None:
    scene.write("head.json", _head("running"))
    assert scene.tick(hours_later=0.9)["action"] == "none"
    done = scene.tick(hours_later=1.1)
    assert done["action"] == "to-zero"
    assert done["reason"].startswith("no heartbeat for 39")


def test_an_instance_that_never_boots_is_silent(scene: Scene) -> None:
    # User data that cannot start at all: no head.json, no event, nothing but a running instance.
    assert scene.tick(hours_later=1.1)["action"] == "to-zero"
    assert scene.capacity() == 0


def test_attempts_that_commit_nothing_are_counted(scene: Scene) -> None:
    scene.end(scene.start(), scene.start())
    assert scene.tick()["action"] == "none"
    scene.end(scene.start())
    assert scene.tick() == {
        "action": "to-zero",
        "reason": "3 attempts in a row committed nothing",
    }


def test_a_commit_ends_the_count(scene: Scene) -> None:
    scene.end(scene.start(), scene.start(), scene.start())
    scene.write("checkpoints/00000010-g0003-a/state.safetensors", {})
    scene.write("head.json", _head("running", "00000005-g0002-a", "00000010-g0003-a"))
    assert scene.tick()["action"] == "none"


def test_a_commit_that_was_dropped_still_ends_the_count(scene: Scene) -> None:
    """`reopen --from-checkpoint` goes back to one from before the latest attempts."""
    scene.end(scene.start(), scene.start(), scene.start())
    scene.write("checkpoints/00000010-g0003-a/state.safetensors", {})
    scene.write("head.json", _head("running", "00000005-g0002-a", "00000010-g0003-a"))
    scene.tick()
    scene.write("head.json", _head("released", "00000005-g0002-a"))
    assert scene.tick()["action"] == "none"


def test_a_deploy_after_a_stop_begins_a_new_count(scene: Scene) -> None:
    scene.end(scene.start(), scene.start(), scene.start())
    assert scene.tick()["action"] == "to-zero"
    client("ec2").modify_spot_fleet_request(SpotFleetRequestId=scene.fleet_id, TargetCapacity=1)
    assert scene.tick()["action"] == "none"


def test_a_stop_is_recorded_and_told_once(scene: Scene) -> None:
    scene.write("head.json", _head("finished"))
    scene.tick()
    assert scene.tick()["action"] == "none"
    keys = client("s3").list_objects_v2(Bucket="runs", Prefix="runs/run-1/events/")
    (key,) = [each["Key"] for each in keys["Contents"]]
    assert key.endswith("Z-guard-to-zero.json")
    record = scene.read(key.removeprefix("runs/run-1/"))
    assert (record["message"], record["fleet_id"]) == ("the run is finished", scene.fleet_id)
    (message,) = scene.messages()
    assert message["headline"] == "Fleet to zero: the run is finished"


@pytest.mark.parametrize(
    "detail_type",
    [
        "EC2 Spot Instance Interruption Warning",
        "EC2 Instance Rebalance Recommendation",
        "EC2 Instance State-change Notification",
    ],
)
def test_events_of_own_instances_are_forwarded(scene: Scene, detail_type: str) -> None:
    (instance_id,) = scene.instances()
    done = scene.tick(event=_event(detail_type, instance_id))
    assert done == {"action": "forward", "reason": f"{detail_type}: {instance_id}"}
    (message,) = scene.messages()
    assert message["detail"]["instance-id"] == instance_id


def test_events_of_foreign_instances_are_not(scene: Scene) -> None:
    foreign = scene.start(tags=[{"Key": "Stack", "Value": "OtherStack"}])
    done = scene.tick(event=_event("EC2 Instance State-change Notification", foreign))
    assert done == {"action": "none", "reason": f"{foreign} is not an instance of this stack"}
    assert scene.messages() == []


def test_an_own_instance_that_ec2_forgot_is_still_known(scene: Scene) -> None:
    now = datetime.now(UTC).timestamp()
    attempt = {"launched": now - 60, "seen": now - 30, "is_live": True}
    scene.write("guard.json", {"format": 1, "stopped": 0.0, "attempts": {"i-0gone": attempt}})
    done = scene.tick(event=_event("EC2 Instance State-change Notification", "i-0gone"))
    assert done["action"] == "forward"


def test_an_event_can_be_the_moment_to_stop(scene: Scene) -> None:
    scene.write("head.json", _head("finished"))
    (instance_id,) = scene.instances()
    done = scene.tick(event=_event("EC2 Instance State-change Notification", instance_id))
    assert done["action"] == "to-zero"
    assert len(scene.messages()) == 2


def test_a_stack_without_a_fleet_is_nothing_to_guard(scene: Scene) -> None:
    client("ssm").delete_parameter(Name="/TrainingStack/fleet-id")
    done = scene.tick()
    assert done["action"] == "none"
    assert done["reason"].endswith("no fleet of this stack is above zero")


def test_two_guards_at_once_lose_no_attempt(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ledger.read_ledger
    other = {"launched": 0.0, "seen": 36_000.0, "is_live": False}

    def read_and_be_overtaken(settings: Settings) -> Any:
        found = read(settings)
        monkeypatch.setattr(ledger, "read_ledger", read)
        scene.write("guard.json", {"format": 1, "stopped": 0.0, "attempts": {"i-0other": other}})
        return found

    monkeypatch.setattr(ledger, "read_ledger", read_and_be_overtaken)
    scene.tick()
    assert set(scene.read("guard.json")["attempts"]) == {"i-0other", *scene.instances()}


def test_fails_when_the_fleet_may_not_be_seen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An error that is not "not there" must reach Lambda's retries and the log.
    client("s3").delete_bucket(Bucket="runs")
    with pytest.raises(ClientError, match="NoSuchBucket"):
        scene.tick()


def test_lambda_calls_it_with_the_constructs_environment(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {
        "STACK_NAME": "TrainingStack",
        "FLEET_PARAMETER": "/TrainingStack/fleet-id",
        "RUN_BUCKET": "runs",
        "RUN_PREFIX": "runs/run-1",
        "TOPIC_ARN": scene.topic_arn,
        "MAX_BILLED_HOURS": "72",
        "HEARTBEAT_TIMEOUT_SECONDS": "3600",
        "MAX_BARREN_ATTEMPTS": "5",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert guard.handler(TICK, None)["action"] == "none"
    assert json.loads(capsys.readouterr().out)["action"] == "none"


def test_the_construct_sets_what_the_handler_reads(only: Any) -> None:
    function = only("AWS::Lambda::Function")
    settings = Settings.from_environment(dict.fromkeys(function["Environment"]["Variables"], "1"))
    assert settings.max_barren_attempts == 1
