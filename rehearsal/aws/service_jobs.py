"""AWS Batch's queues of service jobs in the embedded AWS: they queue, start, retry, and end.

A job starts when it is first in its queue and its environment has instances left. Scheduling
policies are moto's. https://docs.aws.amazon.com/batch/latest/userguide/service-jobs.html
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import botocore.session
from botocore.validate import ParamValidator
from werkzeug.wrappers import Response

from rehearsal.aws.iam.access import AccessControl
from rehearsal.aws.iam.requests import read_call
from rehearsal.aws.training_jobs import NOTICE_SECONDS, TrainingJob, new_name

_POLL_SECONDS = 0.1
# What a queue stands on, by Batch's word for it in requests and in ARNs; what it is made with.
_KINDS = {"serviceEnvironment": "service-environment", "jobQueue": "job-queue"}
_WHOLE: Mapping[str, dict[str, Any]] = {
    "serviceEnvironment": {},
    "jobQueue": {"computeEnvironmentOrder": []},
}
_RUNNING = ("SCHEDULED", "STARTING", "RUNNING")
Publish = Callable[[str, str, Mapping[str, Any], Sequence[str]], None]


class Refused(ValueError):
    """What Batch or SageMaker answers with a ClientException or a ValidationException."""


@dataclass(kw_only=True)
class ServiceJob:
    """One service job: its request, its state, its training jobs."""

    id: str
    arn: str
    queue: str
    asked: Mapping[str, Any]  # SubmitServiceJob's
    created: float = field(default_factory=time.time)
    status: str = "RUNNABLE"
    reason: str = ""
    is_terminated: bool = False
    attempts: list[TrainingJob] = field(default_factory=list)
    ended: float | None = None

    @property
    def payload(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.asked["serviceRequestPayload"])
        return found

    @property
    def priority(self) -> int:
        """Within its share; a queue without shares knows none."""
        return (
            int(self.asked.get("schedulingPriority", 0)) if "shareIdentifier" in self.asked else 0
        )

    @property
    def num_instances(self) -> int:
        return int(self.payload["ResourceConfig"]["InstanceCount"])

    def describe(self) -> dict[str, Any]:
        """What DescribeServiceJob answers, and events have in their detail."""
        attempts = [
            {
                "serviceResourceId": {"name": "TrainingJobArn", "value": each.arn},
                "startedAt": _milliseconds(each.created),
                **({"stoppedAt": _milliseconds(each.ended)} if each.ended else {}),
                "statusReason": f"Received status from SageMaker: {each.reason or each.status}",
            }
            for each in self.attempts
        ]
        started = self.attempts[0].created if self.attempts else 0.0
        named = "retryStrategy", "shareIdentifier", "schedulingPriority", "serviceJobType"
        found = {
            "jobId": self.id,
            "jobArn": self.arn,
            "jobName": self.asked["jobName"],
            "jobQueue": self.queue,
            "status": self.status,
            "createdAt": _milliseconds(self.created),
            "startedAt": _milliseconds(started),
            "attempts": attempts,
            **{name: self.asked[name] for name in named if name in self.asked},
        }
        if attempts:
            found["latestAttempt"] = {"serviceResourceId": attempts[-1]["serviceResourceId"]}
        found |= {"statusReason": self.reason} if self.reason else {}
        found |= {"isTerminated": True} if self.is_terminated else {}
        return found | ({"stoppedAt": _milliseconds(self.ended)} if self.ended else {})


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


class ServiceJobs:
    """The account's environments, queues and jobs; a thread starts and ends jobs as is due."""

    def __init__(self, access: AccessControl, environment: Callable[[], Mapping[str, str]]) -> None:
        """`environment` has the variables that point a container to this AWS."""
        self.notice_seconds = NOTICE_SECONDS
        self.variables: dict[str, str] = {}  # of the image
        self.publish: Publish | None = None
        self.jobs: dict[str, ServiceJob] = {}
        self._access, self._environment = access, environment
        self._here = f"arn:aws:batch:{access.region}:{access.account}"
        self._made: dict[str, dict[str, Any]] = {}  # environments and queues, by ARN
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        session = botocore.session.get_session()
        self._models = {name: session.get_service_model(name) for name in ("batch", "sagemaker")}
        self._operations: dict[str, Callable[[Any], dict[str, Any]]] = {
            "SubmitServiceJob": self._submit,
            "DescribeServiceJob": lambda asked: self._job(asked).describe(),
            "TerminateServiceJob": self._terminate,
            "DescribeTrainingJob": lambda asked: self._training(asked).describe(),
        }
        for kind in _KINDS:
            of = kind[0].upper() + kind[1:]
            self._operations |= {
                f"Create{of}": partial(self._create, kind),
                f"Describe{of}s": partial(self._describe, kind),
                f"Update{of}": partial(self._update, kind),
                f"Delete{of}": partial(self._delete, kind),
            }

    def answer(self, service: str, environ: Mapping[str, Any], body: bytes) -> Response | None:
        """Answer a request to Batch or SageMaker; None where it is moto's."""
        if service not in self._models:
            return None
        operation, asked = read_call(service, environ, body)
        if (act := self._operations.get(operation)) is None:
            return None
        kind = "application/x-amz-json-1.1"
        try:
            shape = self._models[service].operation_model(operation).input_shape
            report = ParamValidator().validate(asked, shape)
            if report.has_errors():
                raise Refused(report.generate_report())
            with self._lock:
                return Response(json.dumps(act(asked)), content_type=kind)
        except Refused as refused:
            code = "ClientException" if service == "batch" else "ValidationException"
            headers = {"x-amzn-errortype": code}
            content = json.dumps({"__type": code, "message": str(refused)})
            return Response(content, status=400, headers=headers, content_type=kind)

    def stop(self) -> None:
        """End every container and leave nothing."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        for job in self.jobs.values():
            for each in job.attempts:
                each.forget()

    def interrupt(self, job_id: str) -> None:
        """Take the instance of a job's managed Spot training, with SageMaker's notice."""
        with self._lock:
            assert self.jobs[job_id].payload["EnableManagedSpotTraining"]
            self.jobs[job_id].attempts[-1].tell("interruption")

    def lose(self, job_id: str) -> None:
        """Take the instance of a job's training without a word."""
        with self._lock:
            self.jobs[job_id].attempts[-1].lose()

    def step(self) -> None:
        """Do what is due: take note of ends, retry, start what is first and has room."""
        with self._lock:
            for job in self.jobs.values():
                if job.status in _RUNNING:
                    job.attempts[-1].step()
                    self._follow(job)
            for queue in [each for each in self._made.values() if "jobQueueArn" in each]:
                while (first := self._first(queue)) and self._has_room(queue, first):
                    self._start(first)

    def _follow(self, job: ServiceJob) -> None:
        """Bring a job to the state of its training."""
        training, allowed = job.attempts[-1], job.asked.get("retryStrategy", {}).get("attempts", 1)
        said = f"Received status from SageMaker: {training.reason or training.secondary}"
        if training.status == "Completed":
            self._enter(job, "SUCCEEDED", said)
        elif training.is_over:
            is_last = job.is_terminated or len(job.attempts) >= allowed
            self._enter(job, "FAILED" if is_last else "RUNNABLE", said)
        elif training.secondary == "Training":
            self._enter(job, "RUNNING", "")

    def _enter(self, job: ServiceJob, status: str, reason: str) -> None:
        if job.status == status:
            return
        job.status, job.reason = status, reason
        if status in ("SUCCEEDED", "FAILED"):
            job.ended = time.time()
        if self.publish is not None:
            what = "Batch Service Job State Change"
            self.publish("aws.batch", what, job.describe(), [job.arn])

    def _first(self, queue: Mapping[str, Any]) -> ServiceJob | None:
        """First in, first out; shares are not weighed against each other, as Batch would."""
        waiting = [
            job
            for job in self.jobs.values()
            if job.queue == queue["jobQueueArn"] and job.status == "RUNNABLE"
        ]
        return min(waiting, key=lambda job: (-job.priority, job.created), default=None)

    def _has_room(self, queue: Mapping[str, Any], job: ServiceJob) -> bool:
        arn = queue["serviceEnvironmentOrder"][0]["serviceEnvironment"]
        limit = int(self._made[arn]["capacityLimits"][0]["maxCapacity"])
        taken = sum(
            other.num_instances
            for other in self.jobs.values()
            if other.status in _RUNNING and arn in json.dumps(self._made[other.queue])
        )
        return taken + job.num_instances <= limit

    def _start(self, job: ServiceJob) -> None:
        request, here = job.payload, self._here.replace(":batch:", ":sagemaker:")
        training = TrainingJob(
            arn=f"{here}:training-job/{new_name(job.asked['jobName'])}",
            request=request,
            environment={},
            notice_seconds=self.notice_seconds,
        )
        job.attempts.append(training)
        self._enter(job, "SCHEDULED", "")
        shape = self._models["sagemaker"].operation_model("CreateTrainingJob").input_shape
        report = ParamValidator().validate(request, shape)
        try:
            if report.has_errors():
                raise Refused(report.generate_report())
            training.environment = self._given(request["RoleArn"], training.arn)
        except (Refused, PermissionError) as error:
            training.status, training.reason = "Failed", f"ValidationException: {error}"
            self._follow(job)

    def _given(self, role: str, arn: str) -> dict[str, str]:
        """The variables of a container: this AWS, and the credentials of the job's role."""
        session = self._access.assume(role, service="sagemaker", source_arn=arn, name="SageMaker")
        return {
            **self._environment(),
            **self.variables,
            "AWS_ACCESS_KEY_ID": session.access_key_id,
            "AWS_SECRET_ACCESS_KEY": session.secret_access_key,
            "AWS_SESSION_TOKEN": session.session_token,
        }

    def _submit(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        queue = self._found(asked["jobQueue"])
        if queue["state"] != "ENABLED":
            raise Refused(f"Job queue {queue['jobQueueArn']} is disabled")
        if bool(queue.get("schedulingPolicyArn")) != bool(asked.get("shareIdentifier")):
            raise Refused("shareIdentifier is for a queue with a fair-share scheduling policy")
        identifier, arn = str(uuid.uuid4()), queue["jobQueueArn"]
        job = ServiceJob(
            id=identifier, arn=f"{self._here}:service-job/{identifier}", queue=arn, asked=asked
        )
        self.jobs[identifier] = job
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="service-jobs", daemon=True)
            self._thread.start()
        return {"jobId": job.id, "jobArn": job.arn, "jobName": asked["jobName"]}

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            self.step()

    def _terminate(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(asked)
        job.is_terminated = True
        if job.status in _RUNNING:
            job.attempts[-1].tell("stop")
        elif job.status == "RUNNABLE":
            self._enter(job, "FAILED", asked["reason"])
        return {}

    def _job(self, asked: Mapping[str, Any]) -> ServiceJob:
        if asked["jobId"] not in self.jobs:
            raise Refused(f"Job {asked['jobId']} does not exist")
        return self.jobs[asked["jobId"]]

    def _training(self, asked: Mapping[str, Any]) -> TrainingJob:
        every = (each for job in self.jobs.values() for each in job.attempts)
        found = next((each for each in every if each.name == asked["TrainingJobName"]), None)
        if found is None:
            raise Refused("Requested resource not found.")
        return found

    def _create(self, kind: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        name = asked[f"{kind}Name"]
        for each in asked.get("serviceEnvironmentOrder", []):
            self._found(each["serviceEnvironment"])
        arn = f"{self._here}:{_KINDS[kind]}/{name}"
        whole = {"state": "ENABLED", "status": "VALID", f"{kind}Arn": arn}
        self._made[arn] = whole | _WHOLE[kind] | dict(asked)
        return {f"{kind}Name": name, f"{kind}Arn": arn}

    def _describe(self, kind: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        names = asked.get(f"{kind}s")
        every = [each for each in self._made.values() if f"{kind}Arn" in each]
        wanted = [e for e in every if not names or {e[f"{kind}Name"], e[f"{kind}Arn"]} & {*names}]
        return {f"{kind}s": wanted}

    def _update(self, kind: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        found = self._found(asked[kind])
        found |= {name: value for name, value in asked.items() if name != kind}
        return {f"{kind}Name": found[f"{kind}Name"], f"{kind}Arn": found[f"{kind}Arn"]}

    def _delete(self, kind: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        found = self._found(asked[kind])
        arn = found[f"{kind}Arn"]
        others = [each for each in self._made.values() if each is not found]
        if found["state"] != "DISABLED" or arn in json.dumps(others):
            raise Refused(f"{arn} must be disabled, and of no queue")
        del self._made[arn]
        return {}

    def _found(self, name: str) -> dict[str, Any]:
        for arn, each in self._made.items():
            if name in (arn, arn.rpartition("/")[2]):
                return each
        raise Refused(f"{name} does not exist")
