"""The scene of the Guard's tests: a stack on moto with a fleet of one instance."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError, ConnectTimeoutError
from moto import mock_aws

from embedded_aws import moto_patches
from embedded_aws.capacity import Capacity
from embedded_aws.fleet import CAPACITY
from stacks.guard import duties
from stacks.guard.handler import warm_memory
from stacks.guard.settings import quick_client
from tests.stacks.guard.scene import ACCOUNT, MOTOS_IMAGE, REGION, TAGS, Scene


@contextmanager
def _fleets_of_templates() -> Iterator[None]:
    """The embedded AWS's fleets, as moto's own know neither templates nor on-demand capacity."""
    moto_patches.install()
    CAPACITY[0] = Capacity(spot_usd=lambda _: 0.45)
    yield
    CAPACITY[0] = Capacity()
    moto_patches.uninstall()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    # Loading them takes most of moto's start.
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    # Those of a scene say no word, unless a test has them do so.
    monkeypatch.setattr(duties, "UNHEARD_SECONDS", math.inf)
    warm_memory.cache_clear()
    with mock_aws(), _fleets_of_templates():
        ec2 = quick_client("ec2")
        quick_client("s3").create_bucket(Bucket="runs")
        template = ec2.create_launch_template(
            LaunchTemplateName="training",
            LaunchTemplateData={
                "ImageId": MOTOS_IMAGE,
                "InstanceType": "g5.xlarge",
                "TagSpecifications": [{"ResourceType": "instance", "Tags": TAGS}],
            },
        )["LaunchTemplate"]["LaunchTemplateId"]
        version = {"LaunchTemplateId": template, "Version": "1"}
        fleet_id = ec2.request_spot_fleet(
            SpotFleetRequestConfig={
                "IamFleetRole": f"arn:aws:iam::{ACCOUNT}:role/fleet",
                "TargetCapacity": 1,
                "AllocationStrategy": "priceCapacityOptimized",
                "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": version}],
            }
        )["SpotFleetRequestId"]
        quick_client("ssm").put_parameter(
            Name="/TrainingStack/fleet-id", Value=fleet_id, Type="String"
        )
        topic_arn = quick_client("sns").create_topic(Name="notifications")["TopicArn"]
        variables = {
            "STACK_NAME": "TrainingStack",
            "FLEET_PARAMETER": "/TrainingStack/fleet-id",
            "RUN_BUCKET": "runs",
            "RUN_PREFIX": "runs/run-1",
            "TOPIC_ARN": topic_arn,
            "MAX_BILLED_HOURS": "72",
            "MAX_USD": "0",
            "MAX_WAIT_HOURS": "0",
            "DEADLINE_HOURS": "0",
            "NOTICE_SECONDS": "120",
            "USD_PER_HOUR": json.dumps({"g5.xlarge": {"spot": 0.5, "on-demand": 1.0}}),
            "HEARTBEAT_TIMEOUT_SECONDS": "3600",
            "MAX_BARREN_ATTEMPTS": "3",
        }
        yield Scene(fleet_id=fleet_id, topic_arn=topic_arn, variables=variables)


def _is(call: str, operation: str, parameters: dict[str, Any]) -> bool:
    name, _, what = call.partition(" ")
    return name == operation and what in str(parameters.get("Key", parameters.get("Prefix", "")))


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Return a function that has something done before each API call of a kind, or of several."""
    make: Callable[..., Any] = BaseClient._make_api_call

    def do(call: str, what: Callable[[], None]) -> None:
        def made(self: BaseClient, operation: str, parameters: dict[str, Any]) -> Any:
            if any(_is(each, operation, parameters) for each in call.split(", ")):
                what()
            return make(self, operation, parameters)

        monkeypatch.setattr(BaseClient, "_make_api_call", made)

    return do


def refuse(code: str, status: int) -> Callable[[], None]:
    """Return what raises that answer."""

    def answered() -> None:
        answer: Any = {
            "Error": {"Code": code, "Message": "rehearsed"},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }
        raise ClientError(answer, "Any")

    return answered


def unreachable() -> None:
    raise ConnectTimeoutError(endpoint_url="https://service")
