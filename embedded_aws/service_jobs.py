"""SageMaker's training jobs, and AWS Batch's service jobs (queued ones), in the embedded AWS.

A service job starts when it is first in its queue and its environment has instances left; if it
fails, it is retried. https://docs.aws.amazon.com/batch/latest/userguide/service-jobs.html
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import botocore.session
from botocore.validate import ParamValidator
from moto.batch.models import batch_backends
from werkzeug.wrappers import Response

from embedded_aws.iam.access import AccessControl
from embedded_aws.iam.requests import read_call
from embedded_aws.iam.sessions import variables_of
from embedded_aws.mistakes import beyond_model
from embedded_aws.moto_services import answer_error
from embedded_aws.training_jobs import NOTICE_SECONDS, TrainingJob, new_name

# The kinds, by Batch's word in requests, with its word in ARNs; and what each starts out with.
_KINDS = {"serviceEnvironment": "service-environment", "jobQueue": "job-queue"}
_WHOLE: Mapping[str, dict[str, Any]] = {
    "serviceEnvironment": {},
    "jobQueue": {"computeEnvironmentOrder": []},
}
RUNNING = ("SCHEDULED", "STARTING", "RUNNING")
# How long past usage counts against a share by default, and the least that a job counts.
_DECAY_SECONDS, _LEAST_SECONDS = 600, 60.0


class Refused(ValueError):
    """A request that Batch or SageMaker refuses; `code` is SageMaker's, as Batch has only one."""

    def __init__(self, message: str, code: str = "ValidationException") -> None:
        super().__init__(message)
        self.code = code


@dataclass(kw_only=True)
class ServiceJob:
    """One service job: its request, state and training jobs."""

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
    first_since: float | None = None  # since when it has been first in its queue

    @property
    def share(self) -> str:
        return str(self.asked.get("shareIdentifier", ""))

    @property
    def payload(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.asked["serviceRequestPayload"])
        return found

    @property
    def priority(self) -> int:
        """Its priority within its share; 0 in a queue without shares."""
        return (
            int(self.asked.get("schedulingPriority", 0)) if "shareIdentifier" in self.asked else 0
        )

    @property
    def num_instances(self) -> int:
        return int(self.payload["ResourceConfig"]["InstanceCount"])

    def seconds_since(self, since: float) -> float:
        """Return how long its attempts have run after this time, 0 if none has."""
        ends = [(each.ended or time.time(), each.created) for each in self.attempts]
        ran = sum(max(0.0, ended - max(created, since)) for ended, created in ends)
        return max(_LEAST_SECONDS, ran) if ran else 0.0

    def describe(self) -> dict[str, Any]:
        """Return the response of DescribeServiceJob, which is also the detail of events."""
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


class JobQueues:
    """Service environments and queues, by ARN."""

    def __init__(self, account: str, region: str) -> None:
        self._where = account, region
        self._here = f"arn:aws:batch:{region}:{account}"
        self._made: dict[str, dict[str, Any]] = {}

    def operations(self) -> dict[str, Callable[[Any], dict[str, Any]]]:
        """Return the functions that create, describe, update and delete them, by operation name."""
        found: dict[str, Callable[[Any], dict[str, Any]]] = {}
        for kind in _KINDS:
            of = kind[0].upper() + kind[1:]
            found |= {
                f"Create{of}": partial(self._create, kind),
                f"Describe{of}s": partial(self._describe, kind),
                f"Update{of}": partial(self._update, kind),
                f"Delete{of}": partial(self._delete, kind),
            }
        return found

    def queues(self) -> list[dict[str, Any]]:
        """Return all queues."""
        return [each for each in self._made.values() if "jobQueueArn" in each]

    def first(self, queue: Mapping[str, Any], jobs: Iterable[ServiceJob]) -> ServiceJob | None:
        """Return the job to start next: by least used share, then by priority, then by age."""
        own = [job for job in jobs if job.queue == queue["jobQueueArn"]]
        policy = queue.get("schedulingPolicyArn")
        had: Mapping[str, float] = self._had(policy, own) if policy else {}
        return min(
            (job for job in own if job.status == "RUNNABLE"),
            key=lambda job: (had.get(job.share, 0.0), -job.priority, job.created),
            default=None,
        )

    def _had(self, policy: str, jobs: Iterable[ServiceJob]) -> dict[str, float]:
        """Return each share's usage times its weight: half the weight is due twice as much."""
        account, region = self._where
        (found,) = batch_backends[account][region].describe_scheduling_policies([policy])
        fair = found.to_dict()["fairsharePolicy"]
        weights = {e["shareIdentifier"]: e["weightFactor"] for e in fair["shareDistribution"]}
        since = time.time() - (fair["shareDecaySeconds"] or _DECAY_SECONDS)
        had: dict[str, float] = {}
        for job in jobs:
            used = job.num_instances * job.seconds_since(since)
            had[job.share] = had.get(job.share, 0.0) + weights.get(job.share, 1.0) * used
        return had

    def has_room(
        self, queue: Mapping[str, Any], job: ServiceJob, jobs: Iterable[ServiceJob]
    ) -> bool:
        """Whether its environment has as many instances left as the job asks for."""
        own = self._environment(queue)
        running = [other for other in jobs if other.status in RUNNING]
        same = [other for other in running if self._environment(self._made[other.queue]) is own]
        taken = sum(other.num_instances for other in same)
        return taken + job.num_instances <= self.limit(queue)

    def limit(self, queue: Mapping[str, Any]) -> int:
        """Return how many instances its environment has."""
        return int(self._environment(queue)["capacityLimits"][0]["maxCapacity"])

    def _environment(self, queue: Mapping[str, Any]) -> dict[str, Any]:
        return self.found(queue["serviceEnvironmentOrder"][0]["serviceEnvironment"])

    def _create(self, kind: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        name = asked[f"{kind}Name"]
        for each in asked.get("serviceEnvironmentOrder", []):
            self.found(each["serviceEnvironment"])
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
        found = self.found(asked[kind])
        found |= {name: value for name, value in asked.items() if name != kind}
        return {f"{kind}Name": found[f"{kind}Name"], f"{kind}Arn": found[f"{kind}Arn"]}

    def _delete(self, kind: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        found = self.found(asked[kind])
        arn = found[f"{kind}Arn"]
        others = [each for each in self._made.values() if each is not found]
        if found["state"] != "DISABLED" or arn in json.dumps(others):
            raise Refused(f"{arn} must be disabled, and not in use by a queue")
        del self._made[arn]
        return {}

    def found(self, name: str) -> dict[str, Any]:
        """Return an environment or a queue by its name or ARN."""
        for arn, each in self._made.items():
            if name in (arn, arn.rpartition("/")[2]):
                return each
        raise Refused(f"{name} does not exist")


_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
# Batch's reason for blocking a job that asks for more instances than its environment has.
_TOO_LARGE = "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE"
Publish = Callable[[str, str, Mapping[str, Any], Sequence[str]], None]


class ServiceJobs:
    """The account's environments, queues and jobs; a thread starts and ends jobs when due."""

    def __init__(
        self, access: AccessControl, environment: Callable[[], Mapping[str, str]], application: Any
    ) -> None:
        """`environment` returns the variables that point a container to the AWS `application`."""
        self.notice_seconds = NOTICE_SECONDS
        self.variables: dict[str, str] = {}  # set by the image
        self.folder: Path | None = None  # for the containers' files
        self.publish: Publish | None = None
        self.jobs: dict[str, ServiceJob] = {}
        self.trainings: dict[str, TrainingJob] = {}  # by name
        self._published: dict[str, str] = {}  # each training's last published secondary status
        self._access, self._environment, self._application = access, environment, application
        self._here = f"arn:aws:batch:{access.region}:{access.account}"
        self._queues = JobQueues(access.account, access.region)
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        session = botocore.session.get_session()
        self._models = {name: session.get_service_model(name) for name in ("batch", "sagemaker")}
        self._operations: dict[str, Callable[[Any], dict[str, Any]]] = {
            "SubmitServiceJob": self._submit,
            "DescribeServiceJob": lambda asked: self._job(asked).describe(),
            "TerminateServiceJob": self._terminate,
            "CreateTrainingJob": self._create_training,
            "DescribeTrainingJob": lambda asked: self._training(asked).describe(),
            "StopTrainingJob": self._stop_training,
            **self._queues.operations(),
        }

    def answer(self, service: str, environ: Mapping[str, Any], body: bytes) -> Response | None:
        """Answer a request to Batch or SageMaker; return None if it is for moto."""
        if service not in self._models:
            return None
        operation, asked = read_call(service, environ, body)
        if (act := self._operations.get(operation)) is None:
            return None
        try:
            self._validate(service, operation, asked)
            with self._lock:
                content = json.dumps(act(asked))
            return Response(content, content_type="application/x-amz-json-1.1")
        except Refused as refused:
            code = "ClientException" if service == "batch" else refused.code
            return answer_error(service, environ, code, str(refused), 400)

    def _validate(self, service: str, operation: str, asked: Any) -> None:
        shape = self._models[service].operation_model(operation).input_shape
        report = ParamValidator().validate(asked, shape)
        if report.has_errors():
            raise Refused(report.generate_report())
        needed = {"ResourceConfig": "InstanceCount", "StoppingCondition": "MaxRuntimeInSeconds"}
        for name, part in needed.items() if operation == "CreateTrainingJob" else ():
            if part not in asked.get(name, {}):
                raise Refused(f"{name} lacks {part}, which the embedded AWS requires")
        if why := beyond_model(shape, asked):
            raise Refused(why)
        limits, is_spot = asked.get("StoppingCondition"), asked.get("EnableManagedSpotTraining")
        if is_spot and limits.get("MaxWaitTimeInSeconds", 0) < limits["MaxRuntimeInSeconds"]:
            must = "It must be present and be greater than or equal to MaxRuntimeInSeconds"
            raise Refused(f"Invalid MaxWaitTimeInSeconds. {must}")

    def stop(self) -> None:
        """End every container and remove everything."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        for each in self.trainings.values():
            each.forget()

    def training(self, name: str) -> TrainingJob:
        """Return the training job of this name, or a service job's latest one."""
        return self.jobs[name].attempts[-1] if name in self.jobs else self.trainings[name]

    def interrupt(self, name: str, host: str = "") -> None:
        """Take back one or all instances of a managed Spot training, with SageMaker's notice."""
        with self._lock:
            assert self.training(name).request["EnableManagedSpotTraining"]
            self.training(name).signal("interruption", host)

    def lose(self, name: str, host: str = "") -> None:
        """Take back one or all instances of a training, without a notice."""
        with self._lock:
            self.training(name).lose(host)

    def step(self) -> None:
        """Do what is due: register ended jobs, retry, start the first jobs that fit."""
        with self._lock:
            for training in self.trainings.values():
                try:
                    training.step()
                except Exception as error:  # as on AWS, only that job ends
                    _log.exception("[failed] training job %s", training.name)
                    training.fail(f"InternalServerError: {error}")
                self._publish_state(training)
            for job in self.jobs.values():
                if job.status in RUNNING:
                    self._follow(job)
            for queue in self._queues.queues():
                while first := self._queues.first(queue, self.jobs.values()):
                    if not self._queues.has_room(queue, first, self.jobs.values()):
                        self._wait(queue, first)
                        break
                    self._start(first)

    def _wait(self, queue: Mapping[str, Any], first: ServiceJob) -> None:
        """Publish that a queue is blocked; end its first job if it has been first for too long.

        Batch names the reason, and only a limit with that reason counts; a job that waits for its
        turn has none. Here SageMaker never runs out of capacity.
        """
        if first.first_since is None:
            first.first_since = time.time()
        if first.num_instances <= self._queues.limit(queue):
            return
        if not first.reason.startswith(_TOO_LARGE):
            first.reason = f"{_TOO_LARGE} - Service environment(s) associated with the job queue "
            first.reason += "cannot meet the capacity requirement of the job."
            if self.publish is not None:
                what = "Batch Service Job Queue Blocked"
                self.publish("aws.batch", what, first.describe(), [first.arn])
        for limit in queue.get("jobStateTimeLimitActions", ()):
            is_due = time.time() > first.first_since + limit["maxTimeSeconds"]
            if is_due and limit["reason"] == _TOO_LARGE:
                reason = f"Terminated by JobStateTimeLimit action due to reason: {_TOO_LARGE}"
                self._enter(first, "FAILED", reason)

    def _follow(self, job: ServiceJob) -> None:
        """Update a job to the state of its training."""
        training, allowed = job.attempts[-1], job.asked.get("retryStrategy", {}).get("attempts", 1)
        reason = f"Received status from SageMaker: {training.reason or training.secondary}"
        if training.status == "Completed":
            self._enter(job, "SUCCEEDED", reason)
        elif training.is_over:
            is_last = job.is_terminated or len(job.attempts) >= allowed
            self._enter(job, "FAILED" if is_last else "RUNNABLE", reason)
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

    def _publish_state(self, training: TrainingJob) -> None:
        """Publish a training job's new state."""
        if self.publish is not None and self._published.get(training.name) != training.secondary:
            self._published[training.name] = training.secondary
            what = "SageMaker Training Job State Change"
            self.publish("aws.sagemaker", what, training.describe(), [training.arn])

    def _start(self, job: ServiceJob) -> None:
        training = self._new_training(new_name(job.asked["jobName"]), job.payload)
        job.attempts.append(training)
        job.first_since = None
        self.trainings[training.name] = training
        self._enter(job, "SCHEDULED", "")
        try:
            self._begin(training)
        except PermissionError as error:
            training.fail(f"ValidationException: {error}")
            self._follow(job)

    def _new_training(self, name: str, request: Mapping[str, Any]) -> TrainingJob:
        return TrainingJob(
            arn=f"{self._here.replace(':batch:', ':sagemaker:')}:training-job/{name}",
            request=request,
            environment={},
            notice_seconds=self.notice_seconds,
            below=self.folder,
            application=self._application,
        )

    def _begin(self, training: TrainingJob) -> None:
        """Let it start with its role's credentials; raise PermissionError if these are denied."""
        training.environment = self._given(training.request["RoleArn"], training.arn)
        self._watch()

    def _given(self, role: str, arn: str) -> dict[str, str]:
        """Return a container's variables: for this AWS, and the credentials of the job's role."""
        session = self._access.assume(role, service="sagemaker", source_arn=arn, name="SageMaker")
        return {**self._environment(), **self.variables, **variables_of(session)}

    def _submit(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        queue = self._queues.found(asked["jobQueue"])
        if queue["state"] != "ENABLED":
            raise Refused(f"Job queue {queue['jobQueueArn']} is disabled")
        if bool(queue.get("schedulingPolicyArn")) != bool(asked.get("shareIdentifier")):
            raise Refused("shareIdentifier is for a queue with a fair-share scheduling policy")
        # The page of SubmitServiceJob: of two such requests, the second is rejected.
        if asked.get("clientToken") and any(each.asked == asked for each in self.jobs.values()):
            raise Refused("A job was submitted with the same clientToken and request")
        identifier, arn = str(uuid.uuid4()), queue["jobQueueArn"]
        job = ServiceJob(
            id=identifier, arn=f"{self._here}:service-job/{identifier}", queue=arn, asked=asked
        )
        try:
            payload = job.payload
        except ValueError as error:
            raise Refused(f"serviceRequestPayload is not JSON: {error}") from error
        self._validate("sagemaker", "CreateTrainingJob", payload)
        self.jobs[identifier] = job
        self._watch()
        return {"jobId": job.id, "jobArn": job.arn, "jobName": asked["jobName"]}

    def _watch(self) -> None:
        """Start the thread that calls `step`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="service-jobs", daemon=True)
            self._thread.start()

    def _poll(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            self.step()

    def _terminate(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(asked)
        job.is_terminated = True
        if job.status in RUNNING:
            job.attempts[-1].signal("stop")
        elif job.status == "RUNNABLE":
            self._enter(job, "FAILED", asked["reason"])
        return {}

    def _job(self, asked: Mapping[str, Any]) -> ServiceJob:
        if asked["jobId"] not in self.jobs:
            raise Refused(f"Job {asked['jobId']} does not exist")
        return self.jobs[asked["jobId"]]

    def _training(self, asked: Mapping[str, Any]) -> TrainingJob:
        if asked["TrainingJobName"] not in self.trainings:
            raise Refused("Requested resource not found.")
        return self.trainings[asked["TrainingJobName"]]

    def _create_training(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        training = self._new_training(asked["TrainingJobName"], asked)
        if training.name in self.trainings:
            what = "Training job names must be unique within an AWS account and region"
            raise Refused(what, "ResourceInUse")
        try:
            self._begin(training)
        except PermissionError as error:
            raise Refused(str(error)) from error
        self.trainings[training.name] = training
        return {"TrainingJobArn": training.arn}

    def _stop_training(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if (training := self._training(asked)).is_over:
            raise Refused(f"The job is already {training.status}")
        training.signal("stop")
        return {}
