"""The calls that we make, beside plain moto: where the answers differ, why ours is AWS's (slow)."""

import json
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from moto import mock_aws

from rehearsal.aws import EmbeddedAws

Client = Callable[[str], Any]
TLS_ONLY = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": "arn:aws:s3:::b-1/*",
            "Condition": {"Bool": {"aws:SecureTransport": "false"}}}  # fmt: skip
POLICY = json.dumps({"Version": "2012-10-17", "Statement": [TLS_ONLY]})
WHERE = {"Bucket": "b-1", "Key": "k"}
EVENT = json.dumps(
    {"id": "1", "detail-type": "x", "source": "aws.ec2", "account": "1", "region": "r",
     "time": "2026-01-01T00:00:00Z", "resources": [], "detail": {}}
)  # fmt: skip
# In this order on one account; each gives what of its answer is compared.
CALLS: dict[str, Callable[[Client], Any]] = {
    "create bucket": lambda c: c("s3").create_bucket(Bucket="b-1")["Location"],
    "put": lambda c: c("s3").put_object(**WHERE, Body=b"a")["ETag"],
    "put where nothing is": lambda c: c("s3").put_object(**WHERE, Body=b"b", IfNoneMatch="*"),
    "put over another": lambda c: c("s3").put_object(**WHERE, Body=b"b", IfMatch='"x"'),
    "get": lambda c: c("s3").get_object(**WHERE)["Body"].read(),
    "get what is missing": lambda c: c("s3").get_object(Bucket="b-1", Key="none"),
    "list": lambda c: [each["Key"] for each in c("s3").list_objects_v2(Bucket="b-1")["Contents"]],
    "delete": lambda c: c("s3").delete_objects(Bucket="b-1", Delete={"Objects": [{"Key": "k"}]})[
        "Deleted"
    ],
    "part of no upload": lambda c: c("s3").upload_part(
        **WHERE, UploadId="x" * 20, PartNumber=1, Body=b"a"
    ),
    "odd bucket": lambda c: c("s3").create_bucket(Bucket="A_b"),
    "TLS only": lambda c: c("s3").put_bucket_policy(Bucket="b-1", Policy=POLICY) and None,
    "put over TLS": lambda c: c("s3").put_object(**WHERE, Body=b"a")["ETag"],
    "parameter": lambda c: c("ssm").put_parameter(Name="/a", Value="v", Type="String")["Version"],
    "get parameter": lambda c: c("ssm").get_parameter(Name="/a")["Parameter"]["Value"],
    "missing parameter": lambda c: c("ssm").get_parameter(Name="/none"),
    "metric": lambda c: c("cloudwatch").put_metric_data(
        Namespace="n", MetricData=[{"MetricName": "m", "Value": 1.0}]
    ) and None,
    "topic": lambda c: c("sns").create_topic(Name="t")["TopicArn"],
    "no fleet": lambda c: c("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=["sfr-1"]),
    "no instance": lambda c: c("ec2").terminate_instances(InstanceIds=["i-0123456789abcdef0"]),
    "pattern": lambda c: c("events").test_event_pattern(
        EventPattern='{"source": ["aws.ec2"]}', Event=EVENT
    )["Result"],
    "odd group": lambda c: c("ec2").create_security_group(GroupName="g", Description="é") and None,
    "odd role": lambda c: c("iam").create_role(
        RoleName="a b", AssumeRolePolicyDocument=POLICY
    ) and None,
}  # fmt: skip
# Ours, and why it is AWS's.
DIFFERENCES = {
    "part of no upload": ("NoSuchUpload", "moto ends in a KeyError"),
    "odd bucket": ("InvalidBucketName", "no capitals and no underscores since 2018"),
    "put over TLS": ('"0cc175b9c0f1b6a831c399e269772661"', "moto denies for an unmet condition"),
    "no fleet": ("InvalidSpotFleetRequestId.NotFound", "moto returns an empty list"),
    "pattern": ("True", "moto returns no Result"),
    "odd group": ("InvalidParameterValue", "EC2 takes ASCII alone"),
    "odd role": ("ValidationError", "a role's name has no space"),
}


def answers(client: Client) -> dict[str, str]:
    found = {}
    for name, call in CALLS.items():
        try:
            found[name] = str(call(client))
        except ClientError as error:
            found[name] = error.response["Error"]["Code"]
        except (BotoCoreError, ResponseParserError, KeyError) as error:
            found[name] = type(error).__name__
    return found


@pytest.mark.slow
def test_each_difference_from_moto_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedAws() as aws:
        ours = answers(aws.client)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        theirs = answers(lambda service: boto3.client(service, region_name="us-east-1"))
    different = {name: ours[name] for name in CALLS if ours[name] != theirs[name]}
    assert different == {name: expected for name, (expected, _) in DIFFERENCES.items()}, theirs
