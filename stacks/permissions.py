"""IAM statements as the roles of these stacks have them."""

from collections.abc import Mapping
from typing import Any

from aws_cdk import Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3


def allow(
    sid: str, actions: list[str], resources: list[str], conditions: Mapping[str, Any] | None = None
) -> iam.PolicyStatement:
    """Return a statement that allows these actions."""
    return iam.PolicyStatement(sid=sid, actions=actions, resources=resources, conditions=conditions)


def deny(sid: str, actions: list[str], resources: list[str]) -> iam.PolicyStatement:
    """Return a statement that denies these actions, whatever another allows."""
    effect = iam.Effect.DENY
    return iam.PolicyStatement(sid=sid, effect=effect, actions=actions, resources=resources)


def allow_metrics_in(namespace: str) -> iam.PolicyStatement:
    """Allow publishing metrics in one namespace; the call takes no resources."""
    only = {"StringEquals": {"cloudwatch:namespace": namespace}}
    return allow("PublishMetrics", ["cloudwatch:PutMetricData"], ["*"], only)


def of_stack(stack: Stack, **tags: str) -> dict[str, dict[str, str]]:
    """Return the condition that a resource has the stack's tag, and these."""
    wanted = {"Stack": stack.stack_name, **tags}
    return {"StringEquals": {f"aws:ResourceTag/{key}": value for key, value in wanted.items()}}


def may_use_key_of(bucket: s3.IBucket, role: iam.Role) -> None:
    """Allow S3's calls to a bucket's own key, if any: for reads, writes and parts of uploads."""
    if bucket.encryption_key is not None:
        bucket.encryption_key.grant(role, "kms:Decrypt", "kms:GenerateDataKey")
