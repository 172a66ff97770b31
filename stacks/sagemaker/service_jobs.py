"""The runs of a sweep as service jobs of an AWS Batch queue, which starts SageMaker's jobs.

https://docs.aws.amazon.com/batch/latest/userguide/service-jobs.html says what a queue does;
SweepStack makes one. jobs.json, next to the runs, says which jobs were queued for them.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from contract.aws_errors import checked, settings_checked
from contract.errors import UserError
from contract.keys import HEAD, SWEEP
from contract.sweep import Sweep, SweepRun
from stacks.guard.settings import answer_or_none
from stacks.sagemaker.request import refused_by_model

# With the pauses in between, about a minute where AWS throttles, and 5 to 20 s at other errors;
# boto3's own 3 are over in seconds.
_MAX_ATTEMPTS = 10
_OVER = ("SUCCEEDED", "FAILED")
_ENDED = ("finished", "failed")  # the states of runs whose machine would end at once
# A job that is told to end at its limit has this long to save.
_NOTICE_SECONDS = 120


def patient_client(service: str) -> Any:
    """Return a client that backs off when AWS throttles it."""
    retries = {"mode": "standard", "total_max_attempts": _MAX_ATTEMPTS}
    with settings_checked():
        client = boto3.client(service, config=Config(retries=retries))
        checked(boto3.DEFAULT_SESSION)
    return client


class SweepObjects:
    """The objects next to a sweep's runs in S3."""

    def __init__(self, runs_uri: str, client: Callable[[str], Any]) -> None:
        """Raise ValueError unless `runs_uri` is s3://bucket/prefix."""
        self._bucket, _, self._prefix = runs_uri.removeprefix("s3://").rstrip("/").partition("/")
        if not runs_uri.startswith("s3://") or not self._prefix:
            raise ValueError(
                f"--runs-uri is {runs_uri!r}; a job reaches only S3: write s3://bucket/x"
            )
        self._s3 = client("s3")
        self._etags = dict[str, str]()

    def read(self, key: str) -> bytes | None:
        """Return an object's content; None if it does not exist."""
        place = {"Bucket": self._bucket, "Key": f"{self._prefix}/{key}"}
        answer = answer_or_none(self._s3.get_object, "NoSuchKey", **place)
        if answer is None:
            return None
        self._etags[key] = answer["ETag"]
        data: bytes = answer["Body"].read()
        return data

    def write(self, key: str, data: bytes) -> None:
        """Write an entire object, unless another has written it since it was read here."""
        place = {"Bucket": self._bucket, "Key": f"{self._prefix}/{key}"}
        known = self._etags.get(key)
        condition = {"IfMatch": known} if known else {"IfNoneMatch": "*"}
        try:
            self._etags[key] = self._s3.put_object(**place, Body=data, **condition)["ETag"]
        except ClientError:
            if self.read(key) != data:  # else an answer was lost, and the request sent again
                raise


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The current state of one service job."""

    status: str  # Batch's word; "gone" once Batch has forgotten it
    usd: float | None  # what its training jobs have cost; None: unknown

    @property
    def is_over(self) -> bool:
        return self.status in (*_OVER, "gone")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedSweep:
    """A sweep's queue: the options that it was queued with, and each run's jobs, newest last."""

    arguments: Sequence[str]  # of `python -m stacks.sagemaker sweep`
    usd_per_hour: float | None  # of all instances of a job
    max_usd: float | None  # of the entire sweep
    usd_of_job: float | None  # what one may cost at most, with every attempt
    jobs: dict[str, list[str]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of jobs.json."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "QueuedSweep":
        """Read the file; UserError if it is not jobs.json."""
        try:
            record = json.loads(data)
            if record.pop("format") != 1:
                raise ValueError("another format")
            return cls(**record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where} does not say which jobs were queued ({error})") from error

    def look(self, client: Callable[[str], Any] = patient_client) -> dict[str, list[JobState]]:
        """Return the current state of every job, by run."""
        batch, sagemaker = client("batch"), client("sagemaker")
        return {
            run: [self._job(each, batch, sagemaker) for each in ids]
            for run, ids in self.jobs.items()
        }

    def _job(self, job_id: str, batch: Any, sagemaker: Any) -> JobState:
        try:
            found = batch.describe_service_job(jobId=job_id)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ClientException":
                raise
            return JobState(status="gone", usd=None)
        attempts = [*found.get("attempts", []), found.get("latestAttempt", {})]
        arns = {
            each["serviceResourceId"]["value"] for each in attempts if "serviceResourceId" in each
        }
        seconds = sum(_billed_seconds(arn, sagemaker) for arn in arns)
        usd = None if self.usd_per_hour is None else seconds / 3600 * self.usd_per_hour
        return JobState(status=found["status"], usd=usd)

    def end(self, jobs: Sequence[str], reason: str) -> None:
        """Ask that these jobs end; those that run get SIGTERM and save."""
        batch = patient_client("batch")
        for job in jobs:
            batch.terminate_service_job(jobId=job, reason=reason)

    def reserved(self, states: Mapping[str, Sequence[JobState]]) -> float:
        """Return the dollars spent plus the most that other jobs may still, or may have, cost."""
        of_job = self.usd_of_job or 0.0
        every = [each for jobs in states.values() for each in jobs]
        return sum(each.usd if each.is_over and each.usd is not None else of_job for each in every)


def _billed_seconds(arn: str, sagemaker: Any) -> float:
    """Return a training job's billed seconds, or those since its start while it runs."""
    try:
        found = sagemaker.describe_training_job(TrainingJobName=arn.rpartition("/")[2])
    except ClientError as error:
        # It never began: Batch deletes those for which there was no capacity (service-job-retries).
        if "not found" in str(error):
            return 0.0
        raise
    if "BillableTimeInSeconds" in found:
        return float(found["BillableTimeInSeconds"])
    began = found.get("TrainingStartTime")
    return time.time() - began.timestamp() if began and "TrainingEndTime" not in found else 0.0


def most_usd(usd_per_hour: float, hours: float, attempts: int) -> float:
    """Return the most a job may cost: every attempt for its full time, with its notice."""
    return attempts * usd_per_hour * (hours + _NOTICE_SECONDS / 3600)


def read_sweep(
    runs_uri: str, file: Path | None, client: Callable[[str], Any]
) -> tuple[Sweep, Sequence[SweepRun]]:
    """Return the sweep and its runs that have not ended; ValueError if there is no sweep."""
    if file is not None:
        sweep = Sweep.from_bytes(file.read_bytes(), str(file))
        return sweep, sweep.runs
    read = SweepObjects(runs_uri, client).read
    found = read(SWEEP)
    if found is None:
        raise ValueError(
            f"{runs_uri} has no {SWEEP}; write it with `python -m training sweep --write-only`"
        )
    sweep = Sweep.from_bytes(found, f"{runs_uri}/{SWEEP}")
    heads = {run.name: json.loads(read(f"{run.name}/{HEAD}") or b"{}") for run in sweep.runs}
    return sweep, [run for run in sweep.runs if heads[run.name].get("state") not in _ENDED]


def service_job(request: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return one job's SubmitServiceJob request; ValueError for what would be refused."""
    job: dict[str, Any] = {
        "jobName": request["TrainingJobName"],
        "jobQueue": options.queue,
        "serviceJobType": "SAGEMAKER_TRAINING",
        "retryStrategy": {"attempts": options.attempts},
        "serviceRequestPayload": json.dumps(request),
    }
    if options.share:
        job["shareIdentifier"] = options.share
    if options.priority is not None:
        job["schedulingPriority"] = options.priority
    refused = [*refused_by_model("batch", "SubmitServiceJob", job)]
    if options.attempts > 10:
        refused.append(f"--attempts is {options.attempts}, and at most 10 are allowed")
    if refused:
        raise ValueError("; ".join(refused))
    return job
