"""Acknowledged cdk-nag findings: each by its exact text, with the reason for accepting it."""

import re
from collections.abc import Mapping
from typing import Any

from aws_cdk import Acknowledgment, ArnFormat, Stack, Validations
from aws_cdk import aws_kms as kms
from constructs import Construct


def acknowledge(scope: Construct, reasons: Mapping[str, str]) -> None:
    """Accept findings (the text after AwsSolutions-) below `scope`, each with its reason."""
    Validations.of(scope).acknowledge(
        *(
            Acknowledgment(id=f"AwsSolutions-{finding}", reason=reason)
            for finding, reason in reasons.items()
        )
    )


def resource(scope: Construct, service: str, name: str, **more: str) -> str:
    """Return cdk-nag's finding for an ARN with a wildcard, as format_arn writes it."""
    stack = Stack.of(scope)
    arn = stack.format_arn(
        service=service, resource=name, arn_format=ArnFormat.NO_RESOURCE_NAME, **more
    )
    return f"IAM5[Resource::{_spelled(stack.resolve(arn))}]"


def _spelled(value: Any) -> str:
    """Return a resolved value as cdk-nag writes it, with references in angle brackets."""
    if isinstance(value, str):
        return re.sub(r"\$\{([^}]+)\}", r"<\1>", value)
    ((kind, of),) = value.items()
    if kind == "Fn::Join":
        return str(of[0]).join(map(_spelled, of[1]))
    return f"<{of}>" if kind == "Ref" else _spelled(of)


def objects_in(scope: Construct, bucket_name: str, prefix: str = "") -> str:
    """Return cdk-nag's finding for objects under `prefix`; the name may be a string or token."""
    return resource(scope, "s3", f"{bucket_name}/{prefix}*", region="", account="")


def managed_policy(name: str) -> str:
    """Return cdk-nag's finding for an AWS managed policy."""
    return f"IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/{name}]"


def publish_reasons(key: kms.IKey | None) -> dict[str, str]:
    """Return the finding of grant_publish on a topic with a customer-managed key, if any."""
    reason = "Written by grant_publish for a topic with a key; the statement names only this key."
    return {"IAM5[Action::kms:GenerateDataKey*]": reason} if key else {}


def any_instance(scope: Construct) -> str:
    """Return cdk-nag's finding for all instances."""
    return resource(scope, "ec2", "instance/*")
