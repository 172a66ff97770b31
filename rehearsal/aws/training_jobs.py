"""SageMaker's training jobs in the embedded AWS: one container each, as a process of this machine.

It finds /opt/ml below a folder of its own, as a SageMaker container does, with the credentials of
the job's role. The image is this repository; one instance a job, no channels, no model.tar.gz.
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

REPOSITORY = Path(__file__).parents[2]
# SageMaker sends SIGTERM, and SIGKILL so much later.
NOTICE_SECONDS = 120.0
_FOLDERS = ("input/config", "input/data", "model", "output", "checkpoints", "tmp")
# What told the container to end -> status and secondary status of the job then.
_ENDS = {"stop": ("Stopped", "Stopped"), "limit": ("Stopped", "MaxRuntimeExceeded")}


@dataclass(kw_only=True)
class TrainingJob:
    """One training job; `step` does what is due by now, and calls nothing of AWS."""

    arn: str
    request: Mapping[str, Any]  # CreateTrainingJob's
    environment: Mapping[str, str]  # of its containers
    notice_seconds: float
    created: float = field(default_factory=time.time)
    status: str = "InProgress"
    secondary: str = "Starting"
    reason: str = ""
    ended: float | None = None
    told: str = ""  # why its container was told to end: stop, limit, or interruption
    num_containers: int = 0
    _seconds: float = 0.0  # of containers that have ended
    _told_at: float = 0.0
    _process: subprocess.Popen[bytes] | None = None
    _started: float = 0.0
    _folder: Path | None = None

    @property
    def name(self) -> str:
        return self.arn.rpartition("/")[2]

    @property
    def is_over(self) -> bool:
        return self.status not in ("InProgress", "Stopping")

    @property
    def seconds(self) -> float:
        """How long its containers ran, which is what SageMaker bills."""
        return self._seconds + (time.time() - self._started if self._process else 0.0)

    @property
    def log(self) -> str:
        """What its containers have printed."""
        path = self._folder and self._folder / "log.txt"
        return path.read_text(errors="replace") if path and path.exists() else ""

    def tell(self, why: str) -> None:
        """Tell the container to end, as at a stop, a limit or a Spot interruption."""
        if self._process is None or self.told:
            return
        self.told, self._told_at = why, time.monotonic()
        if why == "stop":
            self.status = self.secondary = "Stopping"
        self._process.send_signal(signal.SIGTERM)

    def lose(self) -> None:
        """Its instance is gone without a word, which SageMaker calls an internal error."""
        self.kill()
        self._end("Failed", "Failed", "InternalServerError: We encountered an internal error")

    def step(self) -> None:
        """Start its container, take note of its end, kill it when its notice is over."""
        if self.is_over:
            return
        if self._process is None:
            self._start()
            return
        limit = self.request["StoppingCondition"]["MaxRuntimeInSeconds"]
        if self.seconds > limit:
            self.tell("limit")
        code = self._process.poll()
        if code is None and self.told and time.monotonic() > self._told_at + self.notice_seconds:
            self.kill()
            code = -signal.SIGKILL
        if code is not None:
            self._conclude(code)

    def kill(self) -> None:
        """End its container and all that this started, and take note of how long it ran."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._seconds += time.time() - self._started
            self._process = None

    def forget(self) -> None:
        """Leave nothing."""
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def describe(self) -> dict[str, Any]:
        """What DescribeTrainingJob answers."""
        named = "StoppingCondition", "ResourceConfig", "RoleArn", "EnableManagedSpotTraining"
        output = self.request["OutputDataConfig"]["S3OutputPath"]
        seconds = max(1, round(self.seconds))
        found = {
            "TrainingJobName": self.name,
            "TrainingJobArn": self.arn,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
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
        is_several = self.request["ResourceConfig"]["InstanceCount"] > 1
        if is_several or self.request.get("InputDataConfig"):
            said = "the embedded AWS trains jobs of one instance and no channels: set dataset-uri"
            self._end("Failed", "Failed", f"ClientError: {said}")
            return
        before = self._folder
        root = Path(tempfile.mkdtemp(prefix="opt-ml-"))
        self._folder = root
        self._furnish(root)
        if before is not None:  # another instance, with an empty volume; the log is CloudWatch's
            shutil.move(before / "log.txt", root / "log.txt")
            shutil.rmtree(before, ignore_errors=True)
        with (root / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "training", "sagemaker", "train", f"--ml-root={root}"],
                cwd=REPOSITORY,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "TMPDIR": str(root / "tmp"),
                    "TRAINING_JOB_NAME": self.name,
                    "TRAINING_JOB_ARN": self.arn,
                    **self.environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started, self.secondary = time.time(), "Training"
        self.num_containers += 1

    def _furnish(self, root: Path) -> None:
        for name in _FOLDERS:
            (root / name).mkdir(parents=True)
        resources = {
            "current_host": "algo-1",
            "current_instance_type": self.request["ResourceConfig"]["InstanceType"],
            "current_group_name": "homogeneousCluster",
            "hosts": ["algo-1"],
            "network_interface_name": "eth0",
        }
        given = {"hyperparameters": self.request.get("HyperParameters", {})}
        for name, content in {**given, "inputdataconfig": {}, "resourceconfig": resources}.items():
            (root / f"input/config/{name}.json").write_text(json.dumps(content), encoding="utf-8")

    def _conclude(self, code: int) -> None:
        self.kill()
        if self.told == "interruption":
            # A managed Spot job starts again by itself, on another instance.
            self.told, self.secondary = "", "Interrupted"
        elif self.told:
            self._end(*_ENDS[self.told], "")
        elif code == 0:
            self._end("Completed", "Completed", "")
        else:
            assert self._folder is not None
            said = self._folder / "output" / "failure"
            text = said.read_text(errors="replace") if said.exists() else ""
            self._end("Failed", "Failed", f"AlgorithmError: {text}, exit code: {code}")

    def _end(self, status: str, secondary: str, reason: str) -> None:
        self.status, self.secondary, self.reason = status, secondary, reason
        self.ended = time.time()


def new_name(job_name: str) -> str:
    """The name that Batch gives a job's next training job, of 63 characters at most."""
    return f"AWSBatch{job_name[:23]}{uuid.uuid4().hex}"
