"""A sweep's runs as service jobs: what botocore's model says of them, and which are left to do."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.validate import ParamValidator
from moto import mock_aws

from contract.sweep import Sweep, drawn_runs
from stacks.sagemaker.__main__ import sagemaker_command as main
from stacks.sagemaker.service_jobs import QueuedSweep

_ACCOUNT = "123456789012"
_GIVEN = {
    "--runs-uri": "s3://bucket/runs/rates",
    "--dataset-uri": "s3://bucket/trajectory",
    "--queue": "gpus",
    "--image": f"{_ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/training:1",
    "--role": f"arn:aws:iam::{_ACCOUNT}:role/Training",
    "--instance-type": "ml.g5.2xlarge",
}
_RUNS = _GIVEN["--runs-uri"]
_SWEEP = Sweep(
    workload="trajectory",
    recipe="laptop",
    drawn="grid",
    runs=drawn_runs(["epochs=1,2,3"], ["seed=4"], None, 0),
)


def _arguments(**other: str) -> list[str]:
    given = _GIVEN | {f"--{name.replace('_', '-')}": value for name, value in other.items()}
    return ["sweep", *(word for pair in given.items() for word in pair)]


def _never(name: str) -> Any:
    raise AssertionError("a dry run of a file calls nothing")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "sweep.json"
    path.write_bytes(_SWEEP.to_bytes())
    return str(path)


def test_each_run_is_a_service_job_that_botocore_accepts(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"sweep_file": file, "share": "vision", "priority": "3", "instances": "2"}
    assert main([*_arguments(**more), "--spot", "--dry-run"], client=_never) == 0
    jobs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    session = botocore.session.get_session()
    asked = session.get_service_model("batch").operation_model("SubmitServiceJob").input_shape
    payload = session.get_service_model("sagemaker").operation_model("CreateTrainingJob")
    for job in jobs:
        assert not ParamValidator().validate(job, asked).has_errors()
        request = json.loads(job["serviceRequestPayload"])
        assert not ParamValidator().validate(request, payload.input_shape).has_errors()
        assert request["ResourceConfig"]["InstanceCount"] == 2
        assert job["retryStrategy"] == {"attempts": 3} and job["jobQueue"] == "gpus"
        assert (job["shareIdentifier"], job["schedulingPriority"]) == ("vision", 3)
    given = [json.loads(job["serviceRequestPayload"])["HyperParameters"] for job in jobs]
    assert [each["run-uri"] for each in given] == [f"{_RUNS}/epochs-{k}" for k in (1, 2, 3)]
    assert [(each["epochs"], each["seed"]) for each in given] == [
        ("1", "4"),
        ("2", "4"),
        ("3", "4"),
    ]
    assert len({job["jobName"] for job in jobs}) == 3


def test_what_has_finished_is_not_queued_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    sent: list[dict[str, Any]] = []

    class Batch:
        def submit_service_job(self, **job: Any) -> dict[str, str]:
            sent.append(job)
            return {"jobArn": f"arn:{job['jobName']}", "jobId": f"id-{len(sent)}"}

    with mock_aws():
        s3 = boto3.client("s3", region_name="us-east-1")
        s3.create_bucket(Bucket="bucket")
        clients = {"s3": s3, "batch": Batch()}
        assert main(_arguments(), client=lambda name: clients[name]) == 2
        assert "has no sweep.json; write it with" in capsys.readouterr().err
        put = {"runs/rates/sweep.json": _SWEEP.to_bytes()}
        put["runs/rates/epochs-1/head.json"] = b'{"state": "finished"}'
        put["runs/rates/epochs-2/head.json"] = b'{"state": "released"}'
        for key, body in put.items():
            s3.put_object(Bucket="bucket", Key=key, Body=body)
        assert main(_arguments(), client=lambda name: clients[name]) == 0
        kept = s3.get_object(Bucket="bucket", Key="runs/rates/jobs.json")["Body"].read()
    printed = capsys.readouterr().out
    assert printed.endswith("[ok] 2 of 3 runs are queued, 0 were already, 1 had ended\n")
    uris = [json.loads(job["serviceRequestPayload"])["HyperParameters"]["run-uri"] for job in sent]
    assert uris == [f"{_RUNS}/epochs-2", f"{_RUNS}/epochs-3"]
    queued = QueuedSweep.from_bytes(kept, "jobs.json")
    assert queued.jobs == {"epochs-2": ["id-1"], "epochs-3": ["id-2"]}
    assert queued.arguments == _arguments() and queued.max_usd is None


def _sweep_in_s3(heads: Mapping[str, bytes]) -> Any:
    s3 = boto3.client("s3", region_name="us-east-1")
    s3.create_bucket(Bucket="bucket")
    for name, body in {"sweep.json": _SWEEP.to_bytes(), **heads}.items():
        s3.put_object(Bucket="bucket", Key=f"runs/rates/{name}", Body=body)
    return s3


def _queued_jobs(s3: Any) -> dict[str, list[str]]:
    kept = s3.get_object(Bucket="bucket", Key="runs/rates/jobs.json")["Body"].read()
    return QueuedSweep.from_bytes(kept, "jobs.json").jobs


class _Queue:
    """Batch, which calls `meanwhile` when a job is submitted."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.sent, self.ended, self._meanwhile = list[str](), list[str](), meanwhile

    def submit_service_job(self, **job: Any) -> dict[str, str]:
        self._meanwhile()
        self.sent.append(f"id-{len(self.sent) + 1}")
        return {"jobArn": f"arn:{job['jobName']}", "jobId": self.sent[-1]}

    def terminate_service_job(self, jobId: str, reason: str) -> None:
        self.ended.append(jobId)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


@pytest.mark.usefixtures("credentials")
def test_a_job_is_recorded_before_the_next_one_is_queued() -> None:
    """Else a kill in between leaves jobs that nobody knows, and `runs resume` pays twice."""
    known = []
    with mock_aws():
        s3 = _sweep_in_s3({})

        def meanwhile() -> None:
            if queue.sent:
                known.append(_queued_jobs(s3))

        queue = _Queue(meanwhile)
        assert main(_arguments(), client=lambda name: {"s3": s3, "batch": queue}[name]) == 0
    assert known == [
        {"epochs-1": ["id-1"]},
        {"epochs-1": ["id-1"], "epochs-2": ["id-2"]},
    ]


@pytest.mark.usefixtures("credentials")
def test_of_two_who_queue_a_sweep_one_ends_its_job(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_aws():
        s3 = _sweep_in_s3({})
        clients: dict[str, Any] = {"s3": s3}
        clients["batch"] = other = _Queue(lambda: None)

        def meanwhile() -> None:
            if not other.sent:
                mine, clients["batch"] = clients["batch"], other
                assert main(_arguments(), client=clients.__getitem__) == 0
                clients["batch"] = mine

        clients["batch"] = queue = _Queue(meanwhile)
        assert main(_arguments(), client=clients.__getitem__) == 1
        assert _queued_jobs(s3) == {f"epochs-{k}": [f"id-{k}"] for k in (1, 2, 3)}
    assert len(other.sent) == 3 and not other.ended
    assert queue.sent == queue.ended == ["id-1"]
    assert "was ended, as jobs.json did not take it" in capsys.readouterr().err


class _Lossy:
    """S3, whose first answer to a put is lost: boto3 sends that again."""

    def __init__(self, s3: Any) -> None:
        self._s3, self._puts = s3, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._s3, name)

    def put_object(self, **given: Any) -> Any:
        self._puts += 1
        if self._puts == 1:
            self._s3.put_object(**given)
        return self._s3.put_object(**given)


@pytest.mark.usefixtures("credentials")
def test_a_write_of_jobs_whose_answer_is_lost_is_not_another_s() -> None:
    with mock_aws():
        s3, queue = _sweep_in_s3({}), _Queue(lambda: None)
        clients = {"s3": _Lossy(s3), "batch": queue}
        assert main(_arguments(), client=clients.__getitem__) == 0
        assert len(_queued_jobs(s3)) == 3 and not queue.ended


@pytest.mark.usefixtures("credentials")
def test_a_job_whose_answer_is_lost_may_be_queued(capsys: pytest.CaptureFixture[str]) -> None:
    """boto3 sends it again with the same token, which Batch refuses."""

    class Lossy(_Queue):
        def submit_service_job(self, **given: Any) -> Any:
            super().submit_service_job(**given)
            text = "a job with the same clientToken and request is there"
            raise ClientError({"Error": {"Message": text}}, "SubmitServiceJob")

    with mock_aws():
        clients = {"s3": _sweep_in_s3({}), "batch": Lossy(lambda: None)}
        assert main(_arguments(), client=clients.__getitem__) == 1
    said = capsys.readouterr().err
    assert "was perhaps queued: " in said and "the same command" not in said
    assert "see aws batch list-service-jobs --job-queue" in said


@pytest.mark.usefixtures("credentials")
def test_a_job_that_can_be_neither_recorded_nor_ended_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = EndpointConnectionError(endpoint_url="https://s3")

    class Away(_Queue):
        def terminate_service_job(self, jobId: str, reason: str) -> None:
            raise away

    with mock_aws():
        s3 = _sweep_in_s3({})
        queue = Away(lambda: setattr(s3, "put_object", refuse))

        def refuse(**_: Any) -> None:
            raise away

        clients = {"s3": s3, "batch": queue}
        assert main(_arguments(), client=clients.__getitem__) == 1
    assert (
        "aws batch terminate-service-job --reason unknown --job-id id-1" in capsys.readouterr().err
    )


@pytest.mark.usefixtures("credentials")
def test_a_run_that_has_failed_for_good_is_not_queued_again() -> None:
    with mock_aws():
        s3, queue = (
            _sweep_in_s3({"epochs-2/head.json": b'{"state": "failed"}'}),
            _Queue(lambda: None),
        )
        assert main(_arguments(), client=lambda name: {"s3": s3, "batch": queue}[name]) == 0
        assert _queued_jobs(s3).keys() == {"epochs-1", "epochs-3"}


@pytest.mark.usefixtures("credentials")
def test_earlier_jobs_count_at_the_price_that_they_had() -> None:
    """Ten hours of another size at $7.09 leave nothing of $75."""
    before = QueuedSweep(
        arguments=[], usd_per_hour=7.09, max_usd=75.0, usd_of_job=1.0, jobs={"epochs-1": ["old"]}
    )

    class Jobs(_Queue):
        def describe_service_job(self, jobId: str) -> dict[str, Any]:
            attempt = {"serviceResourceId": {"name": "TrainingJobArn", "value": "arn:x/training-1"}}
            return {"status": "SUCCEEDED", "createdAt": 1000, "attempts": [attempt]}

        def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
            return {"BillableTimeInSeconds": 36_000}

    with mock_aws():
        s3, jobs = _sweep_in_s3({"jobs.json": before.to_bytes()}), Jobs(lambda: None)
        given = {"max_usd": "75", "max_hours": "1", "usd_per_hour": "1.4"}
        assert main(_arguments(**given), client=lambda name: s3 if name == "s3" else jobs) == 0
    assert not jobs.sent


@pytest.mark.usefixtures("credentials")
def test_a_sweep_is_resumed_at_the_price_that_it_was_queued_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`runs resume` passes the same options, and can be given no price."""
    image = f"{_ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/training:1"
    given = _arguments(image=image, max_usd="75", max_hours="1")
    before = QueuedSweep(
        arguments=given, usd_per_hour=1.4, max_usd=75.0, usd_of_job=4.4, jobs={"epochs-1": []}
    )
    with mock_aws():
        s3, queue = _sweep_in_s3({"jobs.json": before.to_bytes()}), _Queue(lambda: None)
        clients = {"s3": s3, "batch": queue, "sagemaker": None}
        assert main(given, client=clients.__getitem__) == 0
        other = [word.replace("g5.2xlarge", "g5.4xlarge") for word in given]
        assert main(other, client=clients.__getitem__) == 2
    assert len(queue.sent) == 3
    assert "the price of ml.g5.4xlarge is not known here" in capsys.readouterr().err


_NOT_FOUND = "Requested resource not found."


class _Jobs:
    """Two jobs: one ended after half an hour of two instances, one that Batch has forgotten."""

    def describe_service_job(self, jobId: str) -> dict[str, Any]:
        if jobId == "old":
            refusal = {"Error": {"Code": "ClientException", "Message": "does not exist"}}
            raise ClientError(refusal, "DescribeServiceJob")
        gone, attempt = (
            {"serviceResourceId": {"name": "TrainingJobArn", "value": f"arn:x/training-{k}"}}
            for k in (0, 1)
        )
        return {
            "status": jobId.upper(),
            "createdAt": 1000,
            # Batch deletes those for which SageMaker had no capacity.
            # The model requires no resource of an attempt.
            "attempts": [gone, attempt, {"statusReason": "x"}] if jobId == "succeeded" else [],
            "latestAttempt": attempt,
        }

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        if TrainingJobName == "training-0":
            refusal = {"Error": {"Code": "ValidationException", "Message": _NOT_FOUND}}
            raise ClientError(refusal, "DescribeTrainingJob")
        assert TrainingJobName == "training-1"
        return {"BillableTimeInSeconds": 1800}


def test_a_sweeps_dollars_are_those_billed_and_those_that_may_come() -> None:
    def reserved(*jobs: str) -> float:
        queued = QueuedSweep(
            arguments=[], usd_per_hour=4.0, max_usd=10.0, usd_of_job=3.0, jobs={"run": [*jobs]}
        )
        return queued.reserved(queued.look(lambda service: _Jobs()))

    assert reserved("succeeded") == 2.0
    # One that may still train counts as if it cost the most it can, and so does one unknown.
    assert reserved("running") == reserved("runnable") == reserved("old") == 3.0
    assert reserved("failed", "old", "succeeded", "running") == 2.0 + 3.0 + 2.0 + 3.0


def test_as_many_runs_are_queued_as_the_budget_takes(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the runs' configs are checked in a process with torch, which other tests see.
    described = list[object]()
    monkeypatch.setattr(
        "stacks.sagemaker.__main__.describe",
        lambda *asked, also: described.append((asked[-1], *also)),
    )
    given = {"sweep_file": file, "max_hours": "1", "attempts": "2", "usd_per_hour": "1.5"}
    # Each may cost 2 attempts x $1.5 x 1 h and its notice of 120 s: $3.10.
    for dollars, count in (("3.1", 1), ("6.19", 1), ("6.2", 2), ("9.3", 3), ("100", 3)):
        assert main([*_arguments(**given, max_usd=dollars), "--dry-run"], client=_never) == 0
        printed = capsys.readouterr()
        assert len(json.loads(printed.out)) == count
        assert (f"{3 - count} runs are not queued" in printed.err) == (count < 3)
    # In one process for all of them, not one of 2 CPU seconds for each.
    assert described == [tuple(["seed=4", f"epochs={k}"] for k in (1, 2, 3))] * 5


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"attempts": "11"}, "--attempts is 11, and at most 10 are allowed"),
        ({"instances": "3"}, "--instances 3 with 1 processes each are 3 ranks"),
        ({"runs_uri": "runs/rates"}, "a job reaches only S3"),
        (
            {"max_usd": "9", "instance_type": "ml.p4d.24xlarge"},
            "the price of ml.p4d.24xlarge is not known here; add --usd-per-hour",
        ),
        (
            {"max_usd": "900", "image": f"{_ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/training:1"},
            "the price of ml.g5.2xlarge is not known here; add --usd-per-hour",
        ),
        ({"max_usd": "1"}, "--max-usd is 1, but one run may cost $109.23 (3 attempts of 24 h)"),
    ],
)
def test_fails_for_what_batch_or_sagemaker_would_refuse(
    file: str, other: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_arguments(sweep_file=file, **other), "--dry-run"], client=_never) == 2
    assert words in capsys.readouterr().err
