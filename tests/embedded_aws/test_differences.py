"""The calls that we make, beside two emulators: where they differ, and why our answer is AWS's.

pytest -m slow tests/embedded_aws/test_differences.py
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from moto import mock_aws

from embedded_aws import EmbeddedAws

Client = Callable[[str], Any]
# Moved on purpose only: its answers are what ours are compared with.
MINISTACK = "ministack==1.5.33"
TLS_ONLY = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": "arn:aws:s3:::b-1/*",
            "Condition": {"Bool": {"aws:SecureTransport": "false"}}}  # fmt: skip
POLICY = json.dumps({"Version": "2012-10-17", "Statement": [TLS_ONLY]})
TRUST = json.dumps({"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
]})  # fmt: skip
WHERE = {"Bucket": "b-1", "Key": "k"}
ALARM = {"AlarmName": "a", "Namespace": "n", "MetricName": "m", "Statistic": "Average",
         "Period": 60, "EvaluationPeriods": 1, "Threshold": 1.0,
         "ComparisonOperator": "LessThanThreshold"}  # fmt: skip
LINE = {"logGroupName": "g", "logStreamName": "s"}
SPECIFICATION = {
    "LaunchTemplateName": "template",
    "LaunchTemplateData": {"InstanceType": "g5.xlarge"},
}


def multipart(c: Client) -> Any:
    s3, where = c("s3"), {"Bucket": "b-1", "Key": "parts"}
    upload = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    part = s3.upload_part(**upload, PartNumber=1, Body=b"a" * 10)
    parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
    s3.complete_multipart_upload(**upload, MultipartUpload=parts, IfNoneMatch="*")
    return s3.head_object(**where)["ContentLength"], s3.head_object(**where)["ETag"]


def versions(c: Client) -> Any:
    s3 = c("s3")
    status = {"Status": "Enabled"}
    s3.put_bucket_versioning(Bucket="b-1", VersioningConfiguration=status)
    for body in (b"1", b"2"):
        s3.put_object(Bucket="b-1", Key="v", Body=body)
    s3.delete_object(Bucket="b-1", Key="v")
    listed = s3.list_object_versions(Bucket="b-1", Prefix="v")
    old = [each for each in listed["Versions"] if not each["IsLatest"]]
    read = s3.get_object(Bucket="b-1", Key="v", VersionId=old[0]["VersionId"])["Body"].read()
    return len(listed["Versions"]), len(listed["DeleteMarkers"]), read


def log_lines(c: Client) -> Any:
    logs, now = c("logs"), round(time.time() * 1000)
    logs.create_log_group(logGroupName="g")
    logs.create_log_stream(**LINE)
    logs.put_log_events(**LINE, logEvents=[{"timestamp": now, "message": "step 1"}])
    found = logs.filter_log_events(logGroupName="g", filterPattern="step")["events"]
    return [each["message"] for each in found]


# In this order on one account; each gives what of its answer is compared.
CALLS: dict[str, Callable[[Client], Any]] = {
    "create bucket": lambda c: c("s3").create_bucket(Bucket="b-1")["Location"],
    "put": lambda c: c("s3").put_object(**WHERE, Body=b"a")["ETag"],
    "put where nothing is": lambda c: c("s3").put_object(**WHERE, Body=b"b", IfNoneMatch="*"),
    "put over another": lambda c: c("s3").put_object(**WHERE, Body=b"b", IfMatch='"x"'),
    "put over what is gone": lambda c: c("s3").put_object(
        Bucket="b-1", Key="none", Body=b"b", IfMatch='"x"'
    ),
    "put with a wrong checksum": lambda c: c("s3").put_object(
        **WHERE, Body=b"b", ChecksumSHA256="A" * 43 + "="
    ),
    "get": lambda c: c("s3").get_object(**WHERE)["Body"].read(),
    "get a range": lambda c: c("s3").get_object(**WHERE, Range="bytes=0-0")["ContentRange"],
    "get a range behind the end": lambda c: c("s3").get_object(**WHERE, Range="bytes=9-"),
    "get what is missing": lambda c: c("s3").get_object(Bucket="b-1", Key="none"),
    "get if it changed": lambda c: c("s3").get_object(
        **WHERE, IfNoneMatch='"0cc175b9c0f1b6a831c399e269772661"'
    ),
    "head what is missing": lambda c: c("s3").head_object(Bucket="b-1", Key="none"),
    "bucket of nobody": lambda c: c("s3").list_objects_v2(Bucket="b-none"),
    "multipart": multipart,
    "part of no upload": lambda c: c("s3").upload_part(
        **WHERE, UploadId="x" * 20, PartNumber=1, Body=b"a"
    ),
    "list": lambda c: [each["Key"] for each in c("s3").list_objects_v2(Bucket="b-1")["Contents"]],
    "delete": lambda c: c("s3").delete_objects(Bucket="b-1", Delete={"Objects": [{"Key": "k"}]})[
        "Deleted"
    ],
    "versions": versions,
    "odd bucket": lambda c: c("s3").create_bucket(Bucket="A_b"),
    "TLS only": lambda c: c("s3").put_bucket_policy(Bucket="b-1", Policy=POLICY) and None,
    "put over TLS": lambda c: c("s3").put_object(**WHERE, Body=b"a")["ETag"],
    "parameter": lambda c: c("ssm").put_parameter(Name="/a", Value="v", Type="String")["Version"],
    "get parameter": lambda c: c("ssm").get_parameter(Name="/a")["Parameter"]["Value"],
    "parameter again": lambda c: c("ssm").put_parameter(Name="/a", Value="w", Type="String"),
    "missing parameter": lambda c: c("ssm").get_parameter(Name="/none"),
    "metric": lambda c: c("cloudwatch").put_metric_data(
        Namespace="n", MetricData=[{"MetricName": "m", "Value": 1.0}]
    ) and None,
    "alarm": lambda c: c("cloudwatch").put_metric_alarm(**ALARM) and None,
    "no alarm": lambda c: c("cloudwatch").describe_alarms(AlarmNames=["b"])["MetricAlarms"],
    "log": log_lines,
    "log group again": lambda c: c("logs").create_log_group(logGroupName="g"),
    "log to no group": lambda c: c("logs").create_log_stream(**{**LINE, "logGroupName": "none"}),
    "topic": lambda c: c("sns").create_topic(Name="t")["TopicArn"].rpartition(":")[2],
    "publish to nobody": lambda c: c("sns").publish(
        TopicArn=c("sns").create_topic(Name="t")["TopicArn"] + "-none", Message="m"
    ),
    "launch template": lambda c: c("ec2").create_launch_template(**SPECIFICATION)["LaunchTemplate"][
        "LatestVersionNumber"
    ],
    "launch template again": lambda c: c("ec2").create_launch_template(**SPECIFICATION),
    "no fleet": lambda c: c("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=["sfr-1"]),
    "no instance": lambda c: c("ec2").terminate_instances(InstanceIds=["i-0123456789abcdef0"]),
    "no instance of a tag": lambda c: c("ec2").describe_instances(
        Filters=[{"Name": "tag:Stack", "Values": ["none"]}]
    )["Reservations"],
    "zones": lambda c: [
        each["ZoneName"][:9] for each in c("ec2").describe_availability_zones()["AvailabilityZones"]
    ][:1],
    "no subnet": lambda c: c("ec2").describe_subnets(SubnetIds=["subnet-0123456789abcdef0"]),
    "no rule": lambda c: c("events").list_targets_by_rule(Rule="none"),
    "no function": lambda c: c("lambda").get_function_configuration(FunctionName="none"),
    "role": lambda c: c("iam").create_role(RoleName="r", AssumeRolePolicyDocument=TRUST)["Role"][
        "RoleName"
    ],
    "role again": lambda c: c("iam").create_role(RoleName="r", AssumeRolePolicyDocument=TRUST),
    "no role": lambda c: c("iam").get_role(RoleName="none"),
    "no key": lambda c: c("kms").describe_key(KeyId="01234567-89ab-cdef-0123-456789abcdef"),
    "odd group": lambda c: c("ec2").create_security_group(GroupName="g", Description="é") and None,
    "odd role": lambda c: c("iam").create_role(
        RoleName="a b", AssumeRolePolicyDocument=TRUST
    ) and None,
}  # fmt: skip
# The judge, the call: ours, and why it is AWS's.
NAMES = {
    "odd group": ("InvalidParameterValue", "EC2 takes ASCII alone"),
    "odd role": ("ValidationError", "a role's name has no space"),
}
DIFFERENCES = {
    "moto": {
        **NAMES,
        "put with a wrong checksum": ("BadDigest", "moto keeps the checksum and verifies nothing"),
        "get": ("b'a'", "so that moto has what it should not have taken"),
        "get if it changed": ("304", "as above"),
        "part of no upload": ("NoSuchUpload", "moto ends in a KeyError"),
        "odd bucket": ("InvalidBucketName", "no capitals and no underscores since 2018"),
        "put over TLS": (
            '"0cc175b9c0f1b6a831c399e269772661"',
            "moto denies for an unmet condition",
        ),
        "no fleet": ("InvalidSpotFleetRequestId.NotFound", "moto returns an empty list"),
    },
    "ministack": {
        **NAMES,
        "no fleet": ("InvalidSpotFleetRequestId.NotFound", "it has no Spot fleets"),
        "no rule": ("ResourceNotFoundException", "the API reference's error; it returns a list"),
    },
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


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        yield boto3.client


@pytest.fixture
def ministack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Another emulator, in an environment of its own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    subprocess.run(["uv", "venv", "--quiet", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, MINISTACK], check=True)
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = str(chosen.getsockname()[1])
    process = subprocess.Popen(
        [python.with_name("ministack")], cwd=tmp_path, env={**os.environ, "GATEWAY_PORT": port}
    )
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
            time.sleep(0.1)
        yield lambda service: boto3.client(service, endpoint_url=f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("judge", sorted(DIFFERENCES))
def test_each_difference_is_explained(judge: str, request: pytest.FixtureRequest) -> None:
    with EmbeddedAws() as aws:
        ours = answers(aws.client)
    theirs = answers(request.getfixturevalue(judge))
    different = {name: ours[name] for name in CALLS if ours[name] != theirs[name]}
    assert different == {name: said for name, (said, _) in DIFFERENCES[judge].items()}, theirs
