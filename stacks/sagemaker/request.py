"""The CreateTrainingJob request of one run, and what the service would refuse in it.

Checked against the service model that comes with botocore, patterns and lists of names included,
which botocore's own validation leaves to the service.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import botocore.session
from botocore.model import Shape

from contract.aws_errors import settings_checked
from contract.metrics import METRIC_DEFINITIONS
from contract.service_shape import violations
from contract.trainer_options import RANKS
from sizing import catalogue

# Stopping conditions reach up to 28 days; an account's quota may be 5.
_MAX_SECONDS = 28 * 24 * 3600
_JOB_NAME_LENGTH = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """The user's decisions about a job; the names are those of the command line."""

    job_name: str
    image: str
    role: str
    instance_type: str
    run_uri: str
    dataset_uri: str  # empty with channels
    hyperparameters: Mapping[str, str]
    max_hours: float
    max_wait_hours: float | None = None  # of managed Spot; None: on demand
    instances: int = 1  # that train together
    volume_gib: int = 200
    metric: Mapping[str, str] = field(default_factory=dict)  # name -> regular expression
    channel: Mapping[str, str] = field(default_factory=dict)  # split -> S3 URI of its files
    subnet: Sequence[str] = ()
    security_group: Sequence[str] = ()
    kms_key: str = ""


def training_job(settings: JobSettings) -> dict[str, Any]:
    """Return the request; ValueError with every reason why the service would refuse it.

    Without CheckpointConfig: SageMaker's copy of a folder would write into the run's prefix without
    conditions. The run's own checkpoints are what a restarted job resumes from.
    """
    s = settings
    stopping = {"MaxRuntimeInSeconds": round(s.max_hours * 3600)}
    if s.max_wait_hours is not None:
        stopping["MaxWaitTimeInSeconds"] = round(s.max_wait_hours * 3600)
    definitions = {**METRIC_DEFINITIONS, **s.metric}
    request: dict[str, Any] = {
        "TrainingJobName": s.job_name,
        "AlgorithmSpecification": {
            "TrainingImage": s.image,
            "TrainingInputMode": "File",
            "MetricDefinitions": [{"Name": n, "Regex": r} for n, r in definitions.items()],
        },
        "RoleArn": s.role,
        "HyperParameters": {
            **s.hyperparameters,
            "run-uri": s.run_uri,
            **({"dataset-uri": s.dataset_uri} if s.dataset_uri else {}),
        },
        "OutputDataConfig": {"S3OutputPath": f"{s.run_uri.rstrip('/')}/sagemaker"},
        "ResourceConfig": {"InstanceType": s.instance_type, "InstanceCount": s.instances},
        "StoppingCondition": stopping,
        # After the loss of an instance, an InternalServerError; the limits are for all attempts.
        "RetryStrategy": {"MaximumRetryAttempts": 30},
        "EnableManagedSpotTraining": s.max_wait_hours is not None,
    }
    if not _instance_store_gb(s.instance_type):
        request["ResourceConfig"]["VolumeSizeInGB"] = s.volume_gib
    if s.channel:
        request["InputDataConfig"] = [_channel(name, uri) for name, uri in s.channel.items()]
    if s.kms_key:
        request["OutputDataConfig"]["KmsKeyId"] = s.kms_key
    if s.subnet or s.security_group:
        groups = list(s.security_group)
        request["VpcConfig"] = {"Subnets": list(s.subnet), "SecurityGroupIds": groups}
    refused = [*refused_by_model("sagemaker", "CreateTrainingJob", request)]
    refused += _refused_by_rules(request)
    refused += _refused_for_ranks(s)
    if refused:
        raise ValueError("; ".join(refused))
    return request


def _channel(name: str, uri: str) -> dict[str, Any]:
    """Return a channel of the user's own files, which the container finds below input/data/NAME."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "InputMode": "File", "DataSource": {"S3DataSource": source}}


def job_name(run_uri: str, now: str) -> str:
    """Return a name from the run's id and the time, as it must be unique in the account."""
    run_id = re.sub(r"[^a-zA-Z0-9]+", "-", run_uri.rstrip("/").rpartition("/")[2])
    return f"{run_id[: _JOB_NAME_LENGTH - len(now) - 1].strip('-')}-{now}"


def _instance_store_gb(instance_type: str) -> int:
    """Return GB of its own disks, which SageMaker uses in place of a volume; 0 if unknown."""
    found = catalogue.instances().get(instance_type.removeprefix("ml."))
    return found.instance_store_gb if found else 0


def _refused_by_rules(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield refusals that only the documentation states, not the model."""
    stopping = request["StoppingCondition"]
    runtime = stopping["MaxRuntimeInSeconds"]
    wait = stopping.get("MaxWaitTimeInSeconds")
    if runtime > _MAX_SECONDS:
        yield f"--max-hours is {runtime / 3600:g}, but a job runs for at most 672 (28 days)"
    if wait is not None and wait < runtime:
        yield (
            f"--max-wait-hours is {wait / 3600:g}, but it includes the run itself: use at least "
            f"--max-hours, {runtime / 3600:g}"
        )
    given = request["HyperParameters"]
    uris = {name: given[name] for name in ("run-uri", "dataset-uri") if name in given}
    for channel in request.get("InputDataConfig", ()):
        source = channel["DataSource"]["S3DataSource"]
        uris[f"channel {channel['ChannelName']}"] = source["S3Uri"]
    for name, uri in uris.items():
        if not re.fullmatch(r"s3://[^/]+/.+", uri):
            yield f"--{name} is {uri!r}; a job reaches only S3: write s3://bucket/prefix"
    for metric in request["AlgorithmSpecification"]["MetricDefinitions"]:
        name, regex = metric["Name"], metric["Regex"]
        try:
            num_groups = re.compile(regex).groups
        except re.error as error:
            yield f"--metric {name} is the invalid regular expression {regex!r} ({error})"
            continue
        if not num_groups:
            yield f"--metric {name} is {regex!r}: put the number in parentheses"


def _refused_for_ranks(settings: JobSettings) -> Iterator[str]:
    """Yield a refusal of rank counts that would change the result, or of a size without GPUs."""
    size = catalogue.instances().get(settings.instance_type.removeprefix("ml."))
    given = settings.hyperparameters
    each = given.get("num-processes", "auto")
    if settings.instances == 1 or given.get("reduction") == "ring":
        return
    num_each = int(each) if each.isdecimal() else max(1, size.num_gpus) if size else 1
    ranks = settings.instances * num_each
    if ranks not in RANKS:
        yield (
            f"--instances {settings.instances} with {num_each} processes each are {ranks} ranks, "
            "and only 1, 2, 4 or 8 give the result of one; choose other numbers, or set "
            "--hyperparameter num-processes=N, N for each instance"
        )


def refused_by_model(service: str, operation: str, request: Mapping[str, Any]) -> Iterator[str]:
    """Yield what botocore's model of a service objects to in a request."""
    for where, rule, limit, value in violations(_input_shape(service, operation), request):
        yield _in_words(where, rule, limit, value)


@cache
def _input_shape(service: str, operation: str) -> Shape:
    with settings_checked():  # a session reads them, although the model needs none
        model = botocore.session.get_session().get_service_model(service)
    shape = model.operation_model(operation).input_shape
    assert shape is not None
    return shape


def _in_words(where: str, rule: str, limit: Any, value: Any) -> str:
    """Say one thing that the service's model does not allow."""
    if rule == "missing":
        return f"{where} is missing"
    if rule == "enum":
        return f"{where} is {value!r}, which SageMaker does not know{_near(value, limit)}"
    if rule == "pattern":
        return f"{where} is {value!r}, which does not match {limit}"
    size = value if isinstance(value, int | float) else len(value)
    what = "" if size is value else "the length of "
    allowed = f"at most {limit} is allowed" if rule == "max" else f"at least {limit} is needed"
    return f"{what}{where} is {size}, and {allowed}"


def _near(value: str, names: Sequence[str]) -> str:
    family = value.rpartition(".")[0] or value
    known = [name for name in names if f".{name}".rpartition(".")[0].endswith(family)]
    return f"; of that family it knows {', '.join(known)}" if known else ""
