"""Jobs submitted while AWS asks for fewer requests: it waits, and reports what is left to do."""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from contract.sweep import Sweep, drawn_runs
from embedded_aws import EmbeddedAws
from embedded_aws.faults import SUBMITTERS, Fault
from operate.command import main as runs
from stacks.sagemaker.__main__ import sagemaker_command as main

_ACCOUNT = "123456789012"
_JOB = [
    *("--dataset-uri", "s3://bucket/trajectory", "--instance-type", "ml.g5.xlarge"),
    *("--image", f"{_ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/training:1"),
    *("--role", f"arn:aws:iam::{_ACCOUNT}:role/Training"),
]
_SWEEP = ["sweep", "--runs-uri", "s3://bucket/sweeps/rates", "--queue", "gpus", *_JOB]
_NUM_RUNS = 6


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that botocore would have waited."""
    found: list[float] = []
    names = SimpleNamespace(sleep=found.append, time=time.time)
    monkeypatch.setattr("botocore.endpoint.time", names)
    return found


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedAws]:
    """An account with a sweep, and a queue that has no instances yet."""
    rates = [f"learning_rate={','.join(f'0.0{k}' for k in range(1, _NUM_RUNS + 1))}"]
    sweep = Sweep(
        workload="trajectory", recipe="laptop", drawn="grid", runs=drawn_runs(rates, [], None, 0)
    )
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it would keep an earlier account's key
    with EmbeddedAws() as aws:
        for name, value in aws.environment().items():
            monkeypatch.setenv(name, value)
        s3, batch = aws.client("s3"), aws.client("batch")
        s3.create_bucket(Bucket="bucket")
        s3.put_object(Bucket="bucket", Key="sweeps/rates/sweep.json", Body=sweep.to_bytes())
        batch.create_service_environment(
            serviceEnvironmentName="none",
            serviceEnvironmentType="SAGEMAKER_TRAINING",
            capacityLimits=[{"maxCapacity": 0, "capacityUnit": "NUM_INSTANCES"}],
        )
        batch.create_job_queue(
            jobQueueName="gpus",
            jobQueueType="SAGEMAKER_TRAINING",
            priority=1,
            serviceEnvironmentOrder=[{"order": 1, "serviceEnvironment": "none"}],
        )
        yield aws


def test_a_throttled_submit_waits_and_tries_again(
    aws: EmbeddedAws, waited: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    half = Fault(action="batch:SubmitServiceJob", status=429, share=0.5, of=SUBMITTERS)
    aws.faults.begin([half])
    assert main(_SWEEP) == 0
    assert f"[ok] {_NUM_RUNS} of {_NUM_RUNS} runs are queued" in capsys.readouterr().out
    assert half in aws.faults.met and waited


def test_a_throttled_look_at_a_sweep_waits_and_tries_again(
    aws: EmbeddedAws, waited: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_SWEEP) == 0
    half = Fault(action="batch:DescribeServiceJob", status=429, share=0.5, of=SUBMITTERS)
    aws.faults.begin([half])
    capsys.readouterr()
    assert runs(["status", "s3://bucket/sweeps/rates", "--json"]) == 0
    assert half in aws.faults.met and waited
    states = [row["state"] for row in json.loads(capsys.readouterr().out)]
    assert states == ["queued"] * _NUM_RUNS


def test_one_that_is_throttled_for_good_says_what_is_queued_and_how_to_go_on(
    aws: EmbeddedAws, waited: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    aws.faults.begin([Fault(action="batch:SubmitServiceJob", status=429, of=SUBMITTERS)])
    assert main(_SWEEP) == 1
    printed = capsys.readouterr().err
    assert "(TooManyRequestsException)" in printed and "Traceback" not in printed
    assert f"(0 of {_NUM_RUNS} are queued; the same command queues the rest)" in printed
    assert len(waited) == 9
    aws.faults.end()
    assert main(_SWEEP) == 0 and main(_SWEEP) == 0
    assert f"[ok] 0 of {_NUM_RUNS} runs are queued, {_NUM_RUNS} were" in capsys.readouterr().out
    kept = aws.client("s3").get_object(Bucket="bucket", Key="sweeps/rates/jobs.json")["Body"].read()
    assert [len(jobs) for jobs in json.loads(kept)["jobs"].values()] == [1] * _NUM_RUNS


def test_a_training_job_that_is_throttled_for_good_was_not_created(
    aws: EmbeddedAws, waited: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    aws.faults.begin([Fault(action="sagemaker:CreateTrainingJob", status=429, of=SUBMITTERS)])
    run = ["--workload", "trajectory", "--recipe", "laptop", "--run-uri", "s3://bucket/runs/one"]
    assert main(["submit", *run, *_JOB]) == 1
    printed = capsys.readouterr().err
    assert "the job was not created: An error occurred (ThrottlingException)" in printed
    assert len(waited) == 9 and not aws.service_jobs.trainings
