"""What SageMaker does with the hosts of a job: real processes, which do nothing but listen."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError

from embedded_aws import training_jobs
from embedded_aws.job_network import JobNetwork, has_namespaces
from embedded_aws.training_jobs import TrainingJob

# SIGTERM does not end it, as it does not end a container that waits for its end.
_CONTAINER = """#!/bin/sh
trap 'echo signaled' TERM
echo started
while :; do sleep 0.05; done
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingJob]:
    """A job of two instances, which have half a second from a notice to their end."""
    program = tmp_path / "container"
    program.write_text(_CONTAINER)
    program.chmod(0o755)
    monkeypatch.setattr(training_jobs, "sys", SimpleNamespace(executable=str(program)))
    job = TrainingJob(
        arn="arn:aws:sagemaker:us-east-1:123456789012:training-job/hosts",
        request={
            "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        },
        environment={},
        notice_seconds=0.5,
    )
    yield job
    job.forget()


def _until(job: TrainingJob, is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_at, job.log()
        job.step()
        time.sleep(0.02)


def _started(job: TrainingJob, times: int = 1) -> tuple[str, str]:
    """The two hosts, once both run."""
    _until(job, lambda: job.log().count("started") == 2 * times)
    first, second = (each.host for each in job.containers)
    return first, second


def _statuses(job: TrainingJob) -> list[str]:
    return [each["Status"] for each in job.transitions]


def test_a_notice_is_for_one_host_and_then_all_start_again_on_empty_volumes(
    job: TrainingJob,
) -> None:
    first, second = _started(job)
    left = job.containers[0].root / "tmp" / "left"
    left.touch()
    job.signal("interruption", second)
    _until(job, lambda: "signaled" in job.log(second))
    assert job.num_starts == 1 and job.status == "InProgress"
    _started(job, times=2)
    assert "signaled" not in job.log(first) and not left.exists()
    assert _statuses(job) == ["Starting", "Training", "Interrupted", "Training"]
    ended, again = job.transitions[1], job.transitions[2]
    assert ended["EndTime"] - ended["StartTime"] >= 0.5 and ended["EndTime"] == again["StartTime"]


def test_a_host_lost_without_a_word_fails_the_job_once_sagemaker_takes_note(
    job: TrainingJob,
) -> None:
    first, second = _started(job)
    lost, other = job.containers[1].process, job.containers[0].process
    job.lose(second)
    job.step()
    assert lost.poll() is not None and other.poll() is None and not job.is_over
    _until(job, lambda: job.is_over)
    assert (job.status, job.reason[:21]) == ("Failed", "InternalServerError: ")
    assert other.poll() is not None and "signaled" not in job.log(first)


def test_a_job_that_lost_a_host_is_retried_as_often_as_it_asks(job: TrainingJob) -> None:
    job.request = {**job.request, "RetryStrategy": {"MaximumRetryAttempts": 1}}
    _, second = _started(job)
    job.lose(second)
    _started(job, times=2)
    assert _statuses(job) == ["Starting", "Training", "Starting", "Training"]
    job.lose(second)
    _until(job, lambda: job.is_over)
    assert job.status == "Failed" and job.num_starts == 2


def test_a_stop_is_for_all_hosts_and_the_time_counts_once(job: TrainingJob) -> None:
    first, second = _started(job)
    job.signal("stop")
    _until(job, lambda: "signaled" in job.log(first) and "signaled" in job.log(second))
    assert job.status == "Stopping"
    _until(job, lambda: job.is_over)
    assert _statuses(job) == ["Starting", "Training", "Stopping", "Stopped"]
    assert 0.5 <= job.seconds <= time.time() - job.created


def test_what_is_stopped_before_it_starts_never_does(job: TrainingJob) -> None:
    job.signal("stop")
    job.step()
    assert job.status == "Stopped" and not job.containers and job.log() == ""


@pytest.mark.skipif(not has_namespaces(), reason="network namespaces take root on Linux")
def test_a_network_that_a_program_still_holds_is_free_for_the_next_job() -> None:
    network = JobNetwork(2)
    name = network.command("algo-2")[-1]
    with Path("/run/netns", name).open("rb"):
        network.close()
        left = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    assert f" {name.partition('-')[0]}v2@" not in left.stdout


def test_a_job_whose_hosts_get_no_network_fails_with_the_reason(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("ip link add job0 type bridge: Operation not supported")

    monkeypatch.setattr(training_jobs, "JobNetwork", refuse)
    job.step()
    assert job.status == "Failed" and "no network for its hosts: ip link add" in job.reason


@pytest.mark.parametrize("ending", ["interruption", "loss", "loss afterwards"])
def test_a_stop_while_a_job_would_start_again_is_not_forgotten(
    job: TrainingJob, ending: str
) -> None:
    job.request = {**job.request, "RetryStrategy": {"MaximumRetryAttempts": 1}}
    _, second = _started(job)
    if ending == "loss":
        job.lose(second)
    elif ending == "interruption":
        job.signal(ending, second)
    job.signal("stop")
    if ending == "loss afterwards":
        job.lose(second)
    _until(job, lambda: job.is_over)
    assert job.status == "Stopped" and job.num_starts == 1


def test_data_that_one_host_cannot_get_end_the_job_before_any_host_starts(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(_: TrainingJob, folder: Path) -> dict[str, str]:
        if folder.parts[-3].endswith("2"):
            raise ClientError({"Error": {"Code": "503", "Message": "SlowDown"}}, "GetObject")
        return {}

    monkeypatch.setattr(TrainingJob, "_fetch", fetch)
    job.step()
    assert job.status == "Failed" and "Data download failed" in job.reason
    assert not job.containers and job.log() == "" and job.seconds == 0.0
