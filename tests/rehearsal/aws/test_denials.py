"""What a drill denies to instances is denied with the service's own error, and to nobody else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from rehearsal.aws import EmbeddedAws


@pytest.fixture
def instance(aws: EmbeddedAws) -> Iterator[Any]:
    """Return a function that makes clients with an instance's credentials."""

    def client(service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=aws.endpoint,
            region_name=aws.region,
            aws_access_key_id="ASIA0123456789",
            aws_secret_access_key="secret",
            aws_session_token="token",
            config=Config(retries={"max_attempts": 1}),
        )

    yield client
    aws.denied_actions = frozenset()


def test_a_denied_action_fails_for_instances_alone(aws: EmbeddedAws, instance: Any) -> None:
    aws.denied_actions = frozenset({"ec2:TerminateInstances"})
    with pytest.raises(ClientError) as refused:
        instance("ec2").terminate_instances(InstanceIds=["i-0123456789abcdef0"])
    assert refused.value.response["Error"]["Code"] == "UnauthorizedOperation"
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        aws.client("ec2").terminate_instances(InstanceIds=["i-0123456789abcdef0"])
    instance("ec2").describe_instances()


def test_each_protocol_has_its_own_error(aws: EmbeddedAws, instance: Any) -> None:
    aws.denied_actions = frozenset({"ssm:GetParameter", "sts:GetCallerIdentity"})
    with pytest.raises(ClientError, match=r"\(AccessDeniedException\).*ssm:GetParameter"):
        instance("ssm").get_parameter(Name="/TrainingStack/fleet-id")
    with pytest.raises(ClientError, match=r"\(AccessDenied\)"):
        instance("sts").get_caller_identity()


def test_the_aws_cli_reads_a_denial_too(aws: EmbeddedAws, instance: Any, tmp_path: Path) -> None:
    aws.denied_actions = frozenset({"ec2:ModifySpotFleetRequest"})
    credentials = {"AWS_ACCESS_KEY_ID": "ASIA01", "AWS_SESSION_TOKEN": "token"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("aws")), "ec2", "modify-spot-fleet-request",
         "--spot-fleet-request-id", "sfr-1", "--target-capacity", "0"],
        env={"PATH": os.defpath, "HOME": str(tmp_path), **aws.environment(), **credentials},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "(UnauthorizedOperation)" in done.stderr


def test_fails_what_could_never_be_denied(aws: EmbeddedAws) -> None:
    with pytest.raises(ValueError, match="'s3:PutObject' cannot be denied; give one like ec2:"):
        aws.denied_actions = frozenset({"s3:PutObject"})
