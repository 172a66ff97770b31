"""S3 of the embedded AWS: conditional writes, bucket policies, large objects."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError

from embedded_aws import EmbeddedAws

MIB = 2**20


def bucket(aws: EmbeddedAws, name: str) -> str:
    aws.client("s3").create_bucket(Bucket=name)
    return name


def status_of_put(aws: EmbeddedAws, **arguments: Any) -> int:
    try:
        answer = aws.client("s3").put_object(**arguments)
    except ClientError as error:
        answer = error.response
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def test_of_many_conditional_writers_exactly_one_wins(aws: EmbeddedAws) -> None:
    name = bucket(aws, "races")
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            first = list(
                pool.map(
                    lambda i, key=f"new-{number}": status_of_put(
                        aws, Bucket=name, Key=key, Body=b"%d" % i, IfNoneMatch="*"
                    ),
                    range(8),
                )
            )
            etag = aws.client("s3").head_object(Bucket=name, Key=f"new-{number}")["ETag"]
            second = list(
                pool.map(
                    lambda i, key=f"new-{number}", etag=etag: status_of_put(
                        aws, Bucket=name, Key=key, Body=b"again %d" % i, IfMatch=etag
                    ),
                    range(8),
                )
            )
            assert sorted(first) == [200, *[412] * 7]
            assert sorted(second) == [200, *[412] * 7]


def test_a_policy_denies_heads_without_a_condition_and_nothing_else(aws: EmbeddedAws) -> None:
    name = bucket(aws, "guarded")
    arn = f"arn:aws:s3:::{name}"
    statements = [
        {
            "Effect": "Deny",
            "Principal": {"AWS": "*"},
            "Action": "s3:*",
            "Resource": [arn, f"{arn}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        },
        {
            "Effect": "Deny",
            "Principal": {"AWS": "*"},
            "Action": "s3:*",
            "Resource": [arn, f"{arn}/*"],
            "Condition": {"NumericLessThan": {"s3:TlsVersion": 1.2}},
        },
        {
            "Effect": "Deny",
            "Principal": {"AWS": "*"},
            "Action": "s3:PutObject",
            "Resource": f"{arn}/runs/*/head.json",
            "Condition": {"Null": {"s3:if-match": "true", "s3:if-none-match": "true"}},
        },
    ]
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    aws.client("s3").put_bucket_policy(Bucket=name, Policy=policy)
    head = {"Bucket": name, "Key": "runs/run-1/head.json", "Body": b"{}"}
    assert status_of_put(aws, **head) == 403
    with pytest.raises(ClientError, match="explicit deny in a resource-based policy"):
        aws.client("s3").put_object(**head)
    assert status_of_put(aws, **head, IfNoneMatch="*") == 200
    assert status_of_put(aws, **head) == 403
    assert status_of_put(aws, Bucket=name, Key="runs/run-1/config.json", Body=b"{}") == 200
    assert aws.client("s3").get_object(Bucket=name, Key=head["Key"])["Body"].read() == b"{}"


def test_the_aws_cli_moves_a_file_in_parts_and_back(aws: EmbeddedAws, tmp_path: Path) -> None:
    name = bucket(aws, "parts")
    sent, received = tmp_path / "sent", tmp_path / "received"
    sent.write_bytes(os.urandom(20 * MIB))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    program = str(Path(sys.executable).with_name("aws"))
    for source, target in ((sent, f"s3://{name}/f"), (f"s3://{name}/f", received)):
        subprocess.run(
            [program, "s3", "cp", "--only-show-errors", str(source), str(target)],
            env={**kept, **aws.environment()},
            check=True,
        )
    assert received.read_bytes() == sent.read_bytes()


def test_odd_key_names_stay_as_they_are(aws: EmbeddedAws) -> None:
    name, s3 = bucket(aws, "names"), aws.client("s3")
    for key in ("a b/c+d=e.json", "ümlaut/100%.txt", "deep//double"):
        s3.put_object(Bucket=name, Key=key, Body=key.encode())
        assert s3.get_object(Bucket=name, Key=key)["Body"].read() == key.encode()
    found = [item["Key"] for item in s3.list_objects_v2(Bucket=name)["Contents"]]
    assert sorted(found) == sorted(["a b/c+d=e.json", "ümlaut/100%.txt", "deep//double"])


@pytest.mark.slow
def test_large_objects_leave_no_memory_behind(aws: EmbeddedAws) -> None:
    name, s3 = bucket(aws, "large"), aws.client("s3")
    body = os.urandom(64 * MIB)
    s3.put_object(Bucket=name, Key="warm", Body=body)
    before = psutil.Process().memory_info().rss
    for number in range(10):
        s3.put_object(Bucket=name, Key=f"k{number}", Body=body)
        assert len(s3.get_object(Bucket=name, Key=f"k{number}")["Body"].read()) == len(body)
    assert (psutil.Process().memory_info().rss - before) / MIB < 300
