"""Batch's service jobs in the embedded AWS: containers in order, within the limit."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from botocore.validate import ParamValidator

from embedded_aws import EmbeddedAws, Fault, job_network, training_jobs
from embedded_aws.service_jobs import ServiceJob
from embedded_aws.training_jobs import TrainingJob

# In place of our image: a program that says why it fails, as SageMaker's containers do.
_REASON = "no epochs are left"
_IMAGE = f"""#!/bin/sh
for last in "$@"; do :; done
sleep 0.3
echo "{_REASON}" | tee "${{last#--ml-root=}}/output/failure"
exit 2
"""
_TRUST = {
    "Statement": {
        "Effect": "Allow",
        "Action": "sts:AssumeRole",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Condition": {"StringEquals": {"aws:SourceAccount": "123456789012"}},
    }
}


@pytest.fixture(scope="module")
def role(aws: EmbeddedAws) -> str:
    trust = json.dumps(_TRUST)
    made = aws.client("iam").create_role(RoleName="Job", AssumeRolePolicyDocument=trust)
    return str(made["Role"]["Arn"])


@pytest.fixture(autouse=True)
def _image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_text(_IMAGE)
    image.chmod(0o755)
    monkeypatch.setattr(training_jobs, "sys", SimpleNamespace(executable=str(image)))


@pytest.fixture
def _instant(_image: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that end at once."""
    monkeypatch.setattr(training_jobs, "sys", SimpleNamespace(executable="false"))


def _limit(instances: int) -> list[dict[str, Any]]:
    return [{"maxCapacity": instances, "capacityUnit": "NUM_INSTANCES"}]


def _new_queue(aws: EmbeddedAws, name: str, instances: int, **more: Any) -> str:
    batch = aws.client("batch")
    environment = batch.create_service_environment(
        serviceEnvironmentName=name,
        serviceEnvironmentType="SAGEMAKER_TRAINING",
        capacityLimits=_limit(instances),
    )["serviceEnvironmentArn"]
    made: str = batch.create_job_queue(
        jobQueueName=name,
        jobQueueType="SAGEMAKER_TRAINING",
        priority=1,
        serviceEnvironmentOrder=[{"order": 1, "serviceEnvironment": environment}],
        **more,
    )["jobQueueArn"]
    return made


@pytest.fixture
def queue(aws: EmbeddedAws, request: pytest.FixtureRequest) -> str:
    """A queue whose environment has two instances."""
    return _new_queue(aws, request.node.name[:60], 2)


@pytest.fixture
def events(aws: EmbeddedAws) -> Iterator[list[tuple[Any, ...]]]:
    """What is published from now on."""
    found: list[tuple[Any, ...]] = []
    aws.service_jobs.publish = lambda *event: found.append(event)
    yield found
    aws.service_jobs.publish = None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the training jobs that start from now on, without what makes them unique."""
    names: list[str] = []
    start = TrainingJob._start

    def noted(training: TrainingJob) -> None:
        names.append(training.name.removeprefix("AWSBatch")[:-32])
        start(training)

    monkeypatch.setattr(TrainingJob, "_start", noted)
    return names


def _payload(role: str, instances: int = 1) -> str:
    return json.dumps(
        {
            "TrainingJobName": "run-1",
            "RoleArn": role,
            "AlgorithmSpecification": {"TrainingImage": "x", "TrainingInputMode": "File"},
            "HyperParameters": {"epochs": "0"},
            "OutputDataConfig": {"S3OutputPath": "s3://runs/sweeps/x/sagemaker"},
            "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": instances},
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
            "EnableManagedSpotTraining": True,
        }
    )


def _submitted(aws: EmbeddedAws, queue: str, name: str, payload: str, **more: Any) -> str:
    asked = {"jobName": name, "jobQueue": queue, "serviceRequestPayload": payload, **more}
    asked["serviceJobType"] = "SAGEMAKER_TRAINING"
    return str(aws.client("batch").submit_service_job(**asked)["jobId"])


@pytest.fixture
def submit(aws: EmbeddedAws, queue: str, role: str) -> Callable[..., str]:
    def submit(name: str, attempts: int = 1, text: str = "", **payload: Any) -> str:
        given, strategy = text or _payload(role, **payload), {"attempts": attempts}
        return _submitted(aws, queue, name, given, retryStrategy=strategy)

    return submit


def _described(aws: EmbeddedAws, job: str) -> dict[str, Any]:
    found: dict[str, Any] = aws.client("batch").describe_service_job(jobId=job)
    return found


def _ended(aws: EmbeddedAws, job: str) -> dict[str, Any]:
    while (found := _described(aws, job))["status"] not in ("SUCCEEDED", "FAILED"):
        time.sleep(0.2)
    return found


def _is_of_model(service: str, operation: str, answer: dict[str, Any]) -> bool:
    model = botocore.session.get_session().get_service_model(service)
    shape = model.operation_model(operation).output_shape
    assert shape is not None
    plain = {name: value for name, value in answer.items() if name != "ResponseMetadata"}
    return plain.keys() <= shape.members.keys() and not (
        ParamValidator().validate(plain, shape).has_errors()
    )


def test_jobs_start_in_order_within_the_limit(
    aws: EmbeddedAws,
    submit: Callable[..., str],
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[int] = []
    start = TrainingJob._start

    def noted(training: TrainingJob) -> None:
        start(training)
        every = [each for job in aws.service_jobs.jobs.values() for each in job.attempts]
        alive.append(sum(not each.is_over for each in every))

    monkeypatch.setattr(TrainingJob, "_start", noted)
    names = [f"run-{number}" for number in range(5)]
    jobs = [submit(name) for name in names]
    for job in jobs:
        _ended(aws, job)
    # Batch names a training job after the job, and adds what makes it unique.
    assert started == names
    assert max(alive) == 2


def test_a_failed_job_is_tried_again_and_says_why(
    aws: EmbeddedAws, submit: Callable[..., str], events: list[tuple[Any, ...]]
) -> None:
    job = submit("fails", attempts=2)
    found = _ended(aws, job)
    assert found["status"] == "FAILED" and len(found["attempts"]) == 2
    assert _REASON in found["statusReason"] and "exit code: 2" in found["statusReason"]
    assert _is_of_model("batch", "DescribeServiceJob", found)
    arn = found["latestAttempt"]["serviceResourceId"]["value"]
    name = arn.rpartition("/")[2]
    training = aws.client("sagemaker").describe_training_job(TrainingJobName=name)
    assert training["TrainingJobStatus"] == "Failed" and len(name) <= 63
    assert training["FailureReason"].startswith(f"AlgorithmError: {_REASON}")
    assert training["BillableTimeInSeconds"] >= 1
    assert _is_of_model("sagemaker", "DescribeTrainingJob", training)
    # Tried again, it waits in the queue once more: Batch counts attempts by that.
    states = [detail["status"] for _, _, detail, _ in events if detail.get("jobId") == job]
    assert [each for each in states if each in ("RUNNABLE", "FAILED")] == ["RUNNABLE", "FAILED"]
    assert {event[:2] for event in events} == {
        ("aws.batch", "Batch Service Job State Change"),
        ("aws.sagemaker", "SageMaker Training Job State Change"),
    }
    details = [detail for _, _, detail, _ in events if detail.get("TrainingJobName") == name]
    assert [each["SecondaryStatus"] for each in details] == ["Training", "Failed"]
    passed = [each["Status"] for each in training["SecondaryStatusTransitions"]]
    assert passed == ["Starting", "Training", "Failed"]


def test_what_is_terminated_in_the_queue_never_starts(
    aws: EmbeddedAws, submit: Callable[..., str]
) -> None:
    job = submit("too-large", instances=3)
    behind = submit("behind")
    assert _described(aws, job)["status"] == "RUNNABLE" and not _described(aws, job)["attempts"]
    time.sleep(0.5)
    assert _described(aws, behind)["status"] == "RUNNABLE"  # first in, first out
    aws.client("batch").terminate_service_job(jobId=job, reason="lunch")
    found = _ended(aws, job)
    assert found["status"] == "FAILED" and found["isTerminated"] and not found["attempts"]
    assert found["statusReason"] == "lunch" and _is_of_model("batch", "DescribeServiceJob", found)
    assert _ended(aws, behind)["attempts"]


def test_fails_to_submit_what_is_no_training_job_and_goes_on(
    aws: EmbeddedAws, submit: Callable[..., str], role: str
) -> None:
    whole = json.loads(_payload(role))
    lacking = {**whole, "ResourceConfig": {"InstanceType": "ml.g5.xlarge"}}
    for payload, said in [
        ("{", "serviceRequestPayload is not JSON"),
        ("{}", "Missing required parameter"),
        (json.dumps(lacking), "ResourceConfig lacks InstanceCount"),
        (
            json.dumps({**whole, "RoleArn": "the role of the jobs"}),
            "'roleArn' failed to satisfy constraint",
        ),
        (
            json.dumps({**whole, "StoppingCondition": {"MaxRuntimeInSeconds": 3600}}),
            "Invalid MaxWaitTimeInSeconds",
        ),
    ]:
        with pytest.raises(ClientError, match=said):
            submit("none", text=payload)
    assert _ended(aws, submit("behind"))["attempts"]


@pytest.mark.usefixtures("_instant")
def test_an_error_of_ours_fails_that_job_alone(
    aws: EmbeddedAws, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(training: TrainingJob) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(TrainingJob, "_start", fail)
        found = _ended(aws, submit("broken"))
    assert found["status"] == "FAILED" and "InternalServerError: no space" in found["statusReason"]
    assert "AlgorithmError" in _ended(aws, submit("behind"))["statusReason"]


def test_a_full_queue_says_that_it_stands_and_ends_its_first_job_after_a_day(
    aws: EmbeddedAws, submit: Callable[..., str], queue: str, events: list[tuple[Any, ...]]
) -> None:
    too_large = "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE"
    limits = [
        {"state": "RUNNABLE", "maxTimeSeconds": seconds, "reason": reason, "action": "TERMINATE"}
        for seconds, reason in [(600, "first for long"), (86_400, too_large)]
    ]
    aws.client("batch").update_job_queue(jobQueue=queue, jobStateTimeLimitActions=limits)
    own, _, turn = aws.service_jobs.jobs, submit("busy", instances=2), submit("turn")
    own[turn].first_since = 1.0
    # What only waits for its turn does not stand.
    assert _ended(aws, turn)["attempts"]
    job, behind = submit("too-large", instances=3), submit("behind")
    while not own[job].reason:
        time.sleep(0.1)
    (stands,) = (e[2] for e in events if e[1] == "Batch Service Job Queue Blocked")
    assert stands["jobId"] == job and stands["jobQueue"] == queue
    own[job].first_since -= 86_300
    time.sleep(0.5)
    assert _described(aws, job)["statusReason"].startswith(f"{too_large} - ")
    own[job].first_since -= 101
    said = _ended(aws, job)["statusReason"]
    assert said == f"Terminated by JobStateTimeLimit action due to reason: {too_large}"
    assert _ended(aws, behind)["attempts"]


@pytest.mark.usefixtures("_instant")
def test_shares_take_turns_by_what_each_has_had(
    aws: EmbeddedAws, role: str, started: list[str]
) -> None:
    batch = aws.client("batch")
    parts = [("vision", 1 / 3), ("text", 1.0)]
    policy = batch.create_scheduling_policy(
        name="shares",
        fairsharePolicy={
            "shareDistribution": [
                {"shareIdentifier": name, "weightFactor": weight} for name, weight in parts
            ]
        },
    )["arn"]
    queue = _new_queue(aws, "shared", 0, schedulingPolicyArn=policy)
    jobs = [
        _submitted(aws, queue, f"{share}-{number}", _payload(role), shareIdentifier=share)
        for share in ("vision", "text")
        for number in range(4)
    ]
    batch.update_service_environment(serviceEnvironment="shared", capacityLimits=_limit(1))
    for job in jobs:
        _ended(aws, job)
    # Three to one: so far as both have jobs that wait.
    assert started[:4] == ["vision-0", "text-0", "vision-1", "vision-2"]
    with pytest.raises(ClientError, match="shareIdentifier is for a queue with"):
        _submitted(aws, queue, "none", _payload(role))


@pytest.mark.parametrize("may_have_namespaces", [True, False])
def test_each_host_of_a_job_has_its_own_folder_and_one_that_fails_ends_it_for_all(
    aws: EmbeddedAws,
    submit: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    may_have_namespaces: bool,
) -> None:
    if not may_have_namespaces:
        monkeypatch.setattr(job_network, "has_namespaces", lambda: False)
    found = _ended(aws, submit("hosts", instances=2))
    name = found["latestAttempt"]["serviceResourceId"]["value"].rpartition("/")[2]
    training = aws.service_jobs.training(name)
    assert training.folder is not None and training.network is not None
    hosts = [*training.network.hosts]
    for host in hosts:
        text = (training.folder / host / "input/config/resourceconfig.json").read_text()
        resources = json.loads(text)
        assert resources["current_host"] == host and resources["hosts"] == hosts
        assert resources["instance_groups"][0]["hosts"] == hosts
        assert resources["network_interface_name"] == training.network.interface
    assert len({*hosts}) == 2 and _REASON in training.log()
    assert _REASON in found["statusReason"] and not training.containers
    assert not [*Path("/run/netns").glob(f"*-{os.getpid()}-*")]


def test_a_training_job_of_its_own_starts_stops_and_keeps_its_name(
    aws: EmbeddedAws, role: str
) -> None:
    sagemaker, request = aws.client("sagemaker"), json.loads(_payload(role))
    made = sagemaker.create_training_job(**request)
    assert made["TrainingJobArn"].endswith(":training-job/run-1")
    with pytest.raises(ClientError, match="must be unique"):
        sagemaker.create_training_job(**request)
    sagemaker.stop_training_job(TrainingJobName="run-1")
    while (found := sagemaker.describe_training_job(TrainingJobName="run-1"))[
        "TrainingJobStatus"
    ] in ("InProgress", "Stopping"):
        time.sleep(0.1)
    assert found["TrainingJobStatus"] == "Stopped" == found["SecondaryStatus"]
    assert _is_of_model("sagemaker", "DescribeTrainingJob", found)
    with pytest.raises(ClientError, match="already Stopped"):
        sagemaker.stop_training_job(TrainingJobName="run-1")
    with pytest.raises(ClientError, match="not found"):
        sagemaker.describe_training_job(TrainingJobName="none")


@pytest.mark.usefixtures("_instant")
def test_a_channel_s_files_lie_in_every_host_if_the_role_may_read_them(
    aws: EmbeddedAws, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither is asked, as the files are here.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_PROFILE", "none")
    sagemaker, s3 = aws.client("sagemaker"), aws.client("s3")
    s3.create_bucket(Bucket="own-files")
    s3.put_object(Bucket="own-files", Key="birds/train/crow/")
    s3.put_object(Bucket="own-files", Key="birds/train/crow/1.txt", Body=b"caw")
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://own-files/birds/train/"}
    channel = {"ChannelName": "train", "DataSource": {"S3DataSource": source}}
    request = {**json.loads(_payload(role, 2)), "InputDataConfig": [channel]}

    def ended(name: str) -> dict[str, Any]:
        sagemaker.create_training_job(**{**request, "TrainingJobName": name})
        while not (job := aws.service_jobs.training(name)).is_over:
            time.sleep(0.1)
        return job.describe()

    assert "Data download failed" in ended("birds-1")["FailureReason"]
    allowed = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    aws.client("iam").put_role_policy(RoleName="Job", PolicyName="Read", PolicyDocument=policy)
    assert "exit code" in ended("birds-2")["FailureReason"]
    folder = aws.service_jobs.training("birds-2").folder
    assert folder is not None
    hosts = [*folder.glob("*/input")]
    assert len(hosts) == 2
    for each in hosts:
        assert (each / "data/train/crow/1.txt").read_text() == "caw"
        named = json.loads((each / "config/inputdataconfig.json").read_text())
        assert named == {"train": {"TrainingInputMode": "File"}}


@pytest.mark.usefixtures("_instant")
def test_a_job_whose_answer_is_lost_exists_and_its_name_is_taken(
    aws: EmbeddedAws, role: str
) -> None:
    sagemaker, asked = aws.client("sagemaker"), json.loads(_payload(role))
    asked["TrainingJobName"] = "lost-answer"
    lost = Fault(action="sagemaker:CreateTrainingJob", loses_answer=True, of="submitters")
    aws.faults.begin([lost])
    with pytest.raises(ConnectionClosedError):
        sagemaker.create_training_job(**asked)
    aws.faults.end()
    assert sagemaker.describe_training_job(TrainingJobName="lost-answer")
    with pytest.raises(ClientError, match=r"\(ResourceInUse\)"):
        sagemaker.create_training_job(**asked)


@pytest.mark.usefixtures("_instant")
def test_a_request_that_is_sent_again_after_a_lost_answer_queues_one_job(
    aws: EmbeddedAws, queue: str, role: str
) -> None:
    num_before, payload = len(aws.service_jobs.jobs), _payload(role)
    lost = Fault(action="batch:SubmitServiceJob", loses_answer=True, of="submitters")
    aws.faults.begin([lost])
    with pytest.raises(ConnectionClosedError):  # the client itself sends it again
        _submitted(aws, queue, "once", payload, clientToken="1")
    aws.faults.end()
    with pytest.raises(ClientError, match=r"\(ClientException\).*clientToken"):
        _submitted(aws, queue, "once", payload, clientToken="1")
    _submitted(aws, queue, "other", payload, clientToken="1")
    assert len(aws.service_jobs.jobs) == num_before + 2


def test_fails_as_batch_does(aws: EmbeddedAws, queue: str, submit: Callable[..., str]) -> None:
    batch = aws.client("batch")
    with pytest.raises(ClientError, match=r"ClientException.*does not exist"):
        batch.describe_service_job(jobId="none")
    with pytest.raises(ClientError, match="must be disabled"):
        batch.delete_job_queue(jobQueue=queue)
    batch.update_job_queue(jobQueue=queue, state="DISABLED")
    with pytest.raises(ClientError, match="is disabled"):
        submit("late")
    (found,) = batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
    assert _is_of_model("batch", "DescribeJobQueues", {"jobQueues": [found]})
    every = batch.describe_service_environments()["serviceEnvironments"]
    assert _is_of_model("batch", "DescribeServiceEnvironments", {"serviceEnvironments": every})


def test_a_role_that_does_not_trust_sagemaker_starts_nothing(
    aws: EmbeddedAws, submit: Callable[..., str]
) -> None:
    other = _TRUST["Statement"] | {"Principal": {"Service": "ec2.amazonaws.com"}}
    trust = json.dumps({"Statement": other})
    made = aws.client("iam").create_role(RoleName="Other", AssumeRolePolicyDocument=trust)
    job = submit("denied", text=_payload(made["Role"]["Arn"]))
    assert "sts:AssumeRole" in _ended(aws, job)["statusReason"]


def test_a_share_has_had_what_its_jobs_ran_since_and_not_what_they_did_before() -> None:
    def attempt(created: float, ended: float) -> TrainingJob:
        return TrainingJob(
            arn="x", request={}, environment={}, notice_seconds=1.0, created=created, ended=ended
        )

    old, cut, late = attempt(0.0, 5_000.0), attempt(8_000.0, 9_200.0), attempt(9_300.0, 9_400.0)
    job = ServiceJob(id="1", arn="1", queue="gpus", asked={}, attempts=[old, cut, late])
    assert job.seconds_since(9_000.0) == 300.0
    assert job.seconds_since(9_350.0) == 60.0, "a minute at least"
    assert job.seconds_since(9_500.0) == 0.0
