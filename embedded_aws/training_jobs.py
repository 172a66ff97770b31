"""SageMaker's training jobs in the embedded AWS: one container per instance, here a process.

Each has an /opt/ml in a folder of its own, laid out as in a SageMaker container, and the job role's
credentials. The image is this repository; channels are in File mode, and no model.tar.gz is made.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPES

from embedded_aws.job_network import JobNetwork
from embedded_aws.service_models import new_client

REPOSITORY = Path(__file__).parents[1]
# The time from SageMaker's SIGTERM to its SIGKILL.
NOTICE_SECONDS = 120.0
_FOLDERS = ("input/config", "input/data", "model", "output", "checkpoints", "tmp")
# Why a job's containers end -> the job's final status, secondary status and reason.
_ENDS = {
    "stop": ("Stopped", "Stopped", ""),
    "limit": ("Stopped", "MaxRuntimeExceeded", ""),
    "loss": ("Failed", "Failed", "InternalServerError: We encountered an internal error"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobContainer:
    """The container of one host, as SageMaker starts it."""

    host: str
    root: Path  # its /opt/ml
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it and everything that it started, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(kw_only=True)
class TrainingJob:
    """One training job; call `step` often, which does what is due."""

    arn: str
    request: Mapping[str, Any]  # CreateTrainingJob's
    environment: Mapping[str, str]  # of its containers
    notice_seconds: float
    below: Path | None = None  # where to create its folder; None: tempfile's default
    application: Any = None  # AWS, for containers that cannot reach its address on this machine
    created: float = field(default_factory=time.time)
    status: str = "InProgress"
    reason: str = ""
    ended: float | None = None
    ending: str = ""  # why its containers end: stop, limit, loss, or interruption
    num_starts: int = 0
    containers: list[JobContainer] = field(default_factory=list)
    network: JobNetwork | None = None
    folder: Path | None = None  # contains each host's /opt/ml and log
    transitions: list[dict[str, Any]] = field(default_factory=list)
    _seconds: float = 0.0  # how long ended containers ran
    _signaled_at: float = 0.0
    _started: float = 0.0

    def __post_init__(self) -> None:
        self._enter("Starting")

    @property
    def name(self) -> str:
        return self.arn.rpartition("/")[2]

    @property
    def secondary(self) -> str:
        """The secondary status."""
        return str(self.transitions[-1]["Status"])

    @property
    def num_instances(self) -> int:
        return int(self.request["ResourceConfig"]["InstanceCount"])

    @property
    def is_over(self) -> bool:
        return self.status not in ("InProgress", "Stopping")

    @property
    def seconds(self) -> float:
        """How long its containers have run, which SageMaker bills for each instance."""
        return self._seconds + (time.time() - self._started if self.containers else 0.0)

    def log(self, host: str = "") -> str:
        """Return the output of one host's containers, or that of all hosts, one after the other."""
        files = sorted(self.folder.glob(f"{host or '*'}.log")) if self.folder else []
        return "".join(file.read_text(errors="replace") for file in files)

    def signal(self, why: str, host: str = "") -> None:
        """Send SIGTERM to one host or all, as at a stop, a limit or a Spot interruption."""
        if why == "stop" and not self.containers:
            self._end(*_ENDS[why])
        # A job that is stopped while it is being interrupted, or retried, must not start again.
        is_known = self.ending and not (why == "stop" and self.ending in ("interruption", "loss"))
        if not self.containers or is_known:
            return
        self.ending, self._signaled_at = why, time.monotonic()
        if why == "stop":
            self.status = "Stopping"
            self._enter("Stopping")
        for each in self.containers:
            if host in ("", each.host):
                each.process.send_signal(signal.SIGTERM)

    def lose(self, host: str = "") -> None:
        """Lose one or all instances without a notice, which SageMaker calls an internal error.

        When it notices the loss of one of several is undocumented; here, after `notice_seconds`.
        """
        if self.containers and self.ending != "stop":
            self.ending, self._signaled_at = "loss", time.monotonic()
        for each in self.containers:
            if host in ("", each.host):
                each.kill()

    def fail(self, reason: str) -> None:
        """End it as failed, whatever it is doing."""
        self.kill()
        self._end("Failed", "Failed", reason)

    def step(self) -> None:
        """Start its containers, register their exits, kill them when their notice is over."""
        if self.is_over:
            return
        if not self.containers:
            self._start()
            return
        if self.seconds > self.request["StoppingCondition"]["MaxRuntimeInSeconds"]:
            self.signal("limit")
        codes = [each.process.poll() for each in self.containers]
        is_late = self.ending and time.monotonic() > self._signaled_at + self.notice_seconds
        # One failing container ends the job for all.
        has_failed = any(codes) and not self.ending
        if is_late or has_failed or None not in codes:
            self._conclude(codes)

    def kill(self) -> None:
        """Kill its containers, and add up how long they ran."""
        for each in self.containers:
            each.kill()
        self._seconds, self.containers = self.seconds, []

    def forget(self) -> None:
        """Kill its containers and remove its network and files."""
        self.kill()
        if self.network is not None:
            self.network.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def describe(self) -> dict[str, Any]:
        """Return the response of DescribeTrainingJob, which is also the detail of events."""
        named = "StoppingCondition", "ResourceConfig", "RoleArn", "EnableManagedSpotTraining"
        output = self.request["OutputDataConfig"]["S3OutputPath"]
        seconds = max(1, round(self.seconds))
        found = {
            "TrainingJobName": self.name,
            "TrainingJobArn": self.arn,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
            "SecondaryStatusTransitions": [dict(each) for each in self.transitions],
            "CreationTime": self.created,
            "TrainingTimeInSeconds": seconds,
            "BillableTimeInSeconds": seconds,
            "ModelArtifacts": {"S3ModelArtifacts": f"{output}/{self.name}/output/model.tar.gz"},
            **{name: self.request[name] for name in named if name in self.request},
        }
        if self.reason:
            found["FailureReason"] = self.reason[:1024]
        return found | ({"TrainingEndTime": self.ended} if self.ended else {})

    def _start(self) -> None:
        if self.network is None or self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="sagemaker-", dir=self.below))
            try:
                self.network = JobNetwork(self.num_instances, self.application)
            except OSError as error:
                self.fail(f"InternalServerError: no network for its hosts: {error}")
                return
        hosts, folder = self.network.hosts, self.folder
        try:
            for host in hosts:
                self._furnish(folder / host, host, self.network)
        except ClientError as error:
            self.fail(f"ClientError: Data download failed: {error}")
            return
        self._started = time.time()
        self.containers = [self._start_container(host, self.network, folder) for host in hosts]
        self.num_starts += 1
        self._enter("Training")

    def _start_container(self, host: str, network: JobNetwork, folder: Path) -> JobContainer:
        root = folder / host
        size = INSTANCE_TYPES.get(self.request["ResourceConfig"]["InstanceType"][3:], {})
        gpus = size.get("GpuInfo", {}).get("Gpus", [])
        with (folder / f"{host}.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *network.command(host),
                    *(sys.executable, "-m", "training", "sagemaker", "train", f"--ml-root={root}"),
                ],
                cwd=REPOSITORY,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "TMPDIR": str(root / "tmp"),
                    "TRAINING_JOB_NAME": self.name,
                    "TRAINING_JOB_ARN": self.arn,
                    # Without GPUs here, start as many CPU ranks as the size has GPUs.
                    "TRAINING_CPU_RANKS": str(max(1, sum(each["Count"] for each in gpus))),
                    **self.environment,
                    **network.environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return JobContainer(host=host, root=root, process=process)

    def _furnish(self, root: Path, host: str, network: JobNetwork) -> None:
        # A restart gets a new instance with an empty volume; the log, CloudWatch's, stays.
        shutil.rmtree(root, ignore_errors=True)
        for name in _FOLDERS:
            (root / name).mkdir(parents=True)
        kind, group = self.request["ResourceConfig"]["InstanceType"], "homogeneousCluster"
        hosts = [*network.hosts]
        resources = {
            "current_host": host,
            "current_instance_type": kind,
            "current_group_name": group,
            "hosts": hosts,
            "instance_groups": [
                {"instance_group_name": group, "instance_type": kind, "hosts": hosts}
            ],
            "network_interface_name": network.interface,
        }
        config = {
            "hyperparameters": self.request.get("HyperParameters", {}),
            "inputdataconfig": self._fetch(root / "input/data"),
            "resourceconfig": resources,
        }
        for name, content in config.items():
            (root / f"input/config/{name}.json").write_text(json.dumps(content), encoding="utf-8")

    def _fetch(self, folder: Path) -> dict[str, Any]:
        """Download each channel's files as the role; return inputdataconfig.json's content."""
        named = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        found = {}
        for channel in self.request.get("InputDataConfig", ()):
            role = {name: self.environment[name.upper()] for name in named}
            s3 = new_client("s3", self.environment["AWS_ENDPOINT_URL"], **role)
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            bucket, _, prefix = uri.removeprefix("s3://").partition("/")
            for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
                keys = (each["Key"] for each in page.get("Contents", ()))
                for key in (key for key in keys if not key.endswith("/")):
                    path = folder / channel["ChannelName"] / key.removeprefix(prefix).lstrip("/")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    s3.download_file(bucket, key, str(path))
            found[channel["ChannelName"]] = {"TrainingInputMode": "File"}
        return found

    def _conclude(self, codes: list[int | None]) -> None:
        failed = next((k for k, code in enumerate(codes) if code), None)
        failure = self.containers[failed or 0].root / "output" / "failure"
        self.kill()
        retries = self.request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
        if self.ending == "interruption" or (self.ending == "loss" and self.num_starts <= retries):
            # A managed Spot job restarts by itself, on other instances, and one that is retried.
            self._enter("Interrupted" if self.ending == "interruption" else "Starting")
            self.ending = ""
        elif self.ending:
            self._end(*_ENDS[self.ending])
        elif failed is None:
            self._end("Completed", "Completed", "")
        else:
            text = failure.read_text(errors="replace") if failure.exists() else ""
            self._end("Failed", "Failed", f"AlgorithmError: {text}, exit code: {codes[failed]}")

    def _end(self, status: str, secondary: str, reason: str) -> None:
        self.status, self.reason = status, reason
        self._enter(secondary)
        self.ended = self.transitions[-1]["StartTime"]
        if self.network is not None:
            self.network.close()

    def _enter(self, secondary: str) -> None:
        now = time.time()
        if self.transitions:
            self.transitions[-1]["EndTime"] = now
        self.transitions.append({"Status": secondary, "StartTime": now})


def new_name(job_name: str) -> str:
    """Return Batch's name for a job's next training job, at most 63 characters long."""
    return f"AWSBatch{job_name[:23]}{uuid.uuid4().hex}"
