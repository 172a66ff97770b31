"""What a drill does to AWS meets instances alone, in the words of the service."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError, HTTPClientError

from embedded_aws import EmbeddedAws
from embedded_aws.faults import Fault
from embedded_aws.front import skew_refusal
from embedded_aws.iam.sessions import FUNCTION_KEY
from tests.machine_key import machine_key


@pytest.fixture
def instance(aws: EmbeddedAws) -> Iterator[Any]:
    """Return a function that makes clients with an instance's credentials."""
    key = machine_key(aws)

    def client(service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=aws.endpoint,
            region_name=aws.region,
            aws_access_key_id=key,
            aws_secret_access_key="secret",
            aws_session_token="token",
            config=Config(retries={"total_max_attempts": 1}),
        )

    yield client
    aws.faults.end()


@pytest.fixture
def bucket(aws: EmbeddedAws) -> Iterator[str]:
    aws.client("s3").create_bucket(Bucket="faults")
    yield "faults"
    for item in aws.client("s3").list_objects_v2(Bucket="faults").get("Contents", []):
        aws.client("s3").delete_object(Bucket="faults", Key=item["Key"])
    aws.client("s3").delete_bucket(Bucket="faults")


def denied(action: str) -> Fault:
    return Fault(action=action, status=403)


def test_a_denied_action_fails_for_instances_alone(aws: EmbeddedAws, instance: Any) -> None:
    aws.faults.begin([denied("ec2:TerminateInstances")])
    with pytest.raises(ClientError) as refused:
        instance("ec2").terminate_instances(InstanceIds=["i-0123456789abcdef0"])
    assert refused.value.response["Error"]["Code"] == "UnauthorizedOperation"
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        aws.client("ec2").terminate_instances(InstanceIds=["i-0123456789abcdef0"])
    instance("ec2").describe_instances()


def test_each_protocol_has_its_own_error(aws: EmbeddedAws, instance: Any) -> None:
    aws.faults.begin([denied("ssm:GetParameter"), denied("sts:*"), denied("s3:PutObject")])
    with pytest.raises(ClientError, match=r"\(AccessDeniedException\).*ssm:GetParameter"):
        instance("ssm").get_parameter(Name="/TrainingStack/fleet-id")
    with pytest.raises(ClientError, match=r"\(AccessDenied\)"):
        instance("sts").get_caller_identity()
    with pytest.raises(ClientError, match=r"\(AccessDenied\).*s3:PutObject"):
        instance("s3").put_object(Bucket="none", Key="a", Body=b"")


def test_the_aws_cli_reads_a_denial_too(aws: EmbeddedAws, instance: Any, tmp_path: Path) -> None:
    aws.faults.begin([denied("ec2:ModifySpotFleetRequest")])
    credentials = {"AWS_ACCESS_KEY_ID": machine_key(aws), "AWS_SESSION_TOKEN": "token"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("aws")), "ec2", "modify-spot-fleet-request",
         "--spot-fleet-request-id", "sfr-1", "--target-capacity", "0"],
        env={"PATH": os.defpath, "HOME": str(tmp_path), **aws.environment(), **credentials},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "(UnauthorizedOperation)" in done.stderr


def test_a_fault_covers_the_keys_that_it_names(
    aws: EmbeddedAws, instance: Any, bucket: str
) -> None:
    client = instance("s3")
    aws.faults.begin([Fault(action="s3:*", key="runs/*/head.json", status=503)])
    client.put_object(Bucket=bucket, Key="data/a", Body=b"a")
    with pytest.raises(ClientError, match="SlowDown"):
        client.get_object(Bucket=bucket, Key="runs/1/head.json")
    with pytest.raises(ClientError, match="503"):  # without a body, and so without a code
        client.head_object(Bucket=bucket, Key="runs/1/head.json")


def test_a_lost_answer_is_of_a_request_that_was_done(
    aws: EmbeddedAws, instance: Any, bucket: str
) -> None:
    aws.faults.begin([Fault(action="s3:PutObject", loses_answer=True)])
    with pytest.raises((ConnectionClosedError, HTTPClientError)):
        instance("s3").put_object(Bucket=bucket, Key="a", Body=b"done")
    assert aws.client("s3").get_object(Bucket=bucket, Key="a")["Body"].read() == b"done"


def test_a_slow_service_answers_later(aws: EmbeddedAws, instance: Any) -> None:
    aws.faults.begin([Fault(action="s3:ListBucket", delay_seconds=0.2)])
    began = time.monotonic()
    with pytest.raises(ClientError, match="NoSuchBucket"):
        instance("s3").list_objects_v2(Bucket="none")
    assert time.monotonic() - began >= 0.2


def test_answers_share_a_slow_line(aws: EmbeddedAws, instance: Any, bucket: str) -> None:
    clients = [instance("s3") for _ in range(2)]
    clients[0].put_object(Bucket=bucket, Key="a", Body=bytes(50_000))
    aws.faults.begin([Fault(action="s3:GetObject", bytes_per_second=200_000)])

    def read(client: Any) -> int:
        return len(client.get_object(Bucket=bucket, Key="a")["Body"].read())

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, clients)) == [50_000, 50_000]
    assert time.monotonic() - began >= 0.3


def test_a_clock_an_hour_off_refuses_what_instances_sign(aws: EmbeddedAws, instance: Any) -> None:
    aws.faults.clock_ahead_seconds = -3600
    with pytest.raises(ClientError, match="RequestTimeTooSkewed"):
        instance("s3").get_object(Bucket="none", Key="a")
    with pytest.raises(ClientError, match="RequestExpired"):
        instance("ec2").describe_instances()
    aws.client("ec2").describe_instances()
    # The Guard's clock is Lambda's: it is only the role's permissions that its call lacks.
    guard = aws.access.sessions.begin("arn:aws:iam::123456789012:role/guard", "Guard",
                                      {FUNCTION_KEY: "function:Guard"})  # fmt: skip
    called = boto3.client("ec2", endpoint_url=aws.endpoint, region_name=aws.region,
                          aws_access_key_id=guard.access_key_id, aws_secret_access_key="secret",
                          aws_session_token=guard.session_token)  # fmt: skip
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        called.describe_instances()
    aws.faults.clock_ahead_seconds = 840
    instance("ec2").describe_instances()


def test_a_request_without_a_signed_time_is_not_refused_for_it() -> None:
    now = datetime.now(UTC)
    assert skew_refusal("s3", {}, now) is None
    signed = f"{now - timedelta(minutes=16):%Y%m%dT%H%M%SZ}"
    assert skew_refusal("s3", {"HTTP_X_AMZ_DATE": signed}, now) is not None
