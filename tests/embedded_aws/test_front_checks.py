"""What AWS refuses and moto takes or fails at: each with AWS's own error."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from embedded_aws import EmbeddedAws

METRIC = {"MetricName": "m", "Namespace": "n", "Period": 60, "Statistic": "Average",
          "Threshold": 1.0, "ComparisonOperator": "LessThanThreshold",
          "EvaluationPeriods": 1}  # fmt: skip
TRUST = json.dumps({"Version": "2012-10-17", "Statement": []})


@pytest.mark.parametrize(
    ("service", "operation", "given", "code"),
    [
        ("iam", "create_role", {"RoleName": "a b", "AssumeRolePolicyDocument": TRUST},
         "ValidationError"),
        ("iam", "create_role",
         {"RoleName": "a", "Description": "✓", "AssumeRolePolicyDocument": TRUST},
         "ValidationError"),
        ("s3", "create_bucket", {"Bucket": "a..b"}, "InvalidBucketName"),
        ("sns", "create_topic", {"Name": "a b"}, "InvalidParameter"),
        ("cloudwatch", "put_metric_alarm", {"AlarmName": "a" * 256, **METRIC}, "ValidationError"),
        ("cloudwatch", "put_metric_alarm", {"AlarmName": "a", **METRIC, "Unit": "Parsecs"},
         "ValidationError"),
        ("cloudwatch", "put_metric_data",
         {"Namespace": "n", "MetricData": [{"MetricName": "m", "Value": 1.0, "Dimensions":
          [{"Name": f"n{number}", "Value": "v"} for number in range(31)]}]}, "ValidationError"),
        ("iam", "tag_role", {"RoleName": "a", "Tags": [{"Key": "a*", "Value": "b"}]},
         "ValidationError"),
        ("events", "put_rule", {"Name": "a b", "ScheduleExpression": "rate(1 minute)"},
         "ValidationException"),
        ("logs", "create_log_group", {"logGroupName": "a b"}, "InvalidParameterException"),
    ],
)  # fmt: skip
def test_fails_what_the_model_of_a_service_does_not_take(
    aws: EmbeddedAws, service: str, operation: str, given: Any, code: str
) -> None:
    with pytest.raises(ClientError) as refused:
        getattr(aws.client(service), operation)(**given)
    assert refused.value.response["Error"]["Code"] == code


@pytest.mark.parametrize(
    "call",
    [
        lambda s3, which: s3.upload_part(**which, PartNumber=1, Body=b"a"),
        lambda s3, which: s3.complete_multipart_upload(
            **which, MultipartUpload={"Parts": [{"ETag": "a", "PartNumber": 1}]}
        ),
        lambda s3, which: s3.abort_multipart_upload(**which),
    ],
)
def test_fails_an_upload_that_nobody_began(
    aws: EmbeddedAws, call: Callable[[Any, Any], Any]
) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="uploads")
    with pytest.raises(ClientError, match="NoSuchUpload"):
        call(s3, {"Bucket": "uploads", "Key": "k", "UploadId": "x" * 20})


# Of the one byte "a".
RIGHT = {
    "SHA256": "ypeBEsobvcr6wjGzmiPcTaeG7/gUfE5yuYB3ha/uSLs=",
    "SHA1": "hvfkN/qlp/zhXR3cuerq6jd2Z7g=",
    "CRC32": "6Le+Qw==",
    "XXHASH64": "0k7E8amMbls=",
    "XXHASH3": "5sYyth6WTh8=",
    "XXHASH128": "qW+vcFrxaDTmxjK2HpZOHw==",
}


@pytest.mark.parametrize("name", RIGHT)
def test_fails_a_put_and_a_part_whose_bytes_are_not_those_of_their_checksum(
    aws: EmbeddedAws, name: str
) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket=f"digests-{name.lower()}")
    where = {"Bucket": f"digests-{name.lower()}", "Key": "k"}
    # A real client sends the checksum of what it meant, and bytes may change on their way.
    length = len(base64.b64decode(RIGHT[name]))
    wrong = {f"Checksum{name}": base64.b64encode(bytes(length)).decode()}
    upload = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    for call in (
        lambda: s3.put_object(**where, **wrong, Body=b"a"),
        lambda: s3.upload_part(**upload, **wrong, PartNumber=1, Body=b"a"),
    ):
        with pytest.raises(ClientError) as refused:
            call()
        assert refused.value.response["Error"]["Code"] == "BadDigest"
    assert "Contents" not in s3.list_objects_v2(Bucket=f"digests-{name.lower()}")
    s3.put_object(**where, **{f"Checksum{name}": RIGHT[name]}, Body=b"a")


def test_fails_a_key_that_does_not_exist_as_kms_does(aws: EmbeddedAws) -> None:
    with pytest.raises(ClientError, match="NotFoundException"):
        aws.client("kms").describe_key(KeyId="01234567-89ab-cdef-0123-456789abcdef")
