"""The runs of a sweep as service jobs of an AWS Batch queue, which starts SageMaker's jobs.

https://docs.aws.amazon.com/batch/latest/userguide/service-jobs.html says what a queue does; the
queue itself is the user's.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from contract.keys import HEAD, SWEEP
from contract.sweep import Sweep, SweepRun
from stacks.sagemaker.request import refused_by_model


def read_sweep(
    runs_uri: str, file: Path | None, client: Callable[[str], Any]
) -> tuple[Sweep, Sequence[SweepRun]]:
    """The sweep, and its runs that have not finished; ValueError where there is none."""
    if file is not None:
        sweep = Sweep.from_bytes(file.read_bytes(), str(file))
        return sweep, sweep.runs
    bucket, _, prefix = runs_uri.removeprefix("s3://").rstrip("/").partition("/")
    if not runs_uri.startswith("s3://") or not prefix:
        raise ValueError(f"--runs-uri is {runs_uri!r}; a job reaches only S3: write s3://bucket/x")
    s3 = client("s3")

    def read(key: str) -> bytes | None:
        try:
            body: bytes = s3.get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise
        return body

    found = read(SWEEP)
    if found is None:
        raise ValueError(
            f"{runs_uri} has no {SWEEP}; write it with `python -m training sweep --write-only`"
        )
    sweep = Sweep.from_bytes(found, f"{runs_uri}/{SWEEP}")
    heads = {run.name: json.loads(read(f"{run.name}/{HEAD}") or b"{}") for run in sweep.runs}
    return sweep, [run for run in sweep.runs if heads[run.name].get("state") != "finished"]


def service_job(request: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The SubmitServiceJob request of one training job; ValueError for what would be refused."""
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
