"""Roles of the embedded account, and clients with their sessions."""

import json
from collections.abc import Callable
from typing import Any

import boto3
from botocore.config import Config

from embedded_aws import EmbeddedAws
from tests.embedded_aws.iam.cases import document

Service = Callable[[str], Any]


def trust(service: str) -> str:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": f"{service}.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    return json.dumps(document(statement))


def make_role(aws: EmbeddedAws, name: str, *statements: Any, service: str = "ec2") -> str:
    iam = aws.client("iam")
    arn = iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust(service))["Role"]["Arn"]
    put_policy(aws, name, *statements)
    return str(arn)


def put_policy(aws: EmbeddedAws, role: str, *statements: Any) -> None:
    policy = json.dumps(document(*statements))
    aws.client("iam").put_role_policy(RoleName=role, PolicyName="own", PolicyDocument=policy)


def signed_by(aws: EmbeddedAws, credentials: Any) -> Service:
    def client(service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=aws.endpoint,
            region_name=aws.region,
            aws_access_key_id=credentials.access_key_id,
            aws_secret_access_key=credentials.secret_access_key,
            aws_session_token=getattr(credentials, "session_token", None),
            config=Config(retries={"total_max_attempts": 1}),
        )

    return client
