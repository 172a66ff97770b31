"""AWS Batch's queues of service jobs in the embedded AWS: their limits, shares and order.

Scheduling policies are moto's; how Batch weighs a share's past usage is undocumented.
https://docs.aws.amazon.com/batch/latest/userguide/service-jobs.html
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moto.batch.models import batch_backends

from embedded_aws.training_jobs import TrainingJob

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
    """A request that Batch or SageMaker refuses (ClientException or ValidationException)."""


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
