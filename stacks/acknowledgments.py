"""Acknowledged cdk-nag findings: each by its exact text, with the reason why it is wanted."""

import re
from collections.abc import Mapping

from aws_cdk import Acknowledgment, Stack, Validations
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


def objects_in(scope: Construct, bucket_name: str, prefix: str = "") -> str:
    """Return cdk-nag's finding for objects under `prefix`; the name may be a string or token."""
    name = Stack.of(scope).resolve(bucket_name)
    if isinstance(name, dict):
        (name,) = name.values()
    # cdk-nag writes <AWS::Region> where CloudFormation writes ${AWS::Region}.
    name = re.sub(r"\$\{([^}]+)\}", r"<\1>", name)
    return f"IAM5[Resource::arn:<AWS::Partition>:s3:::{name}/{prefix}*]"


def managed_policy(name: str) -> str:
    """Return cdk-nag's finding for an AWS managed policy."""
    return f"IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/{name}]"


def publish_reasons(key: kms.IKey | None) -> dict[str, str]:
    """Return the finding of grant_publish on a topic with a customer-managed key, if any."""
    reason = "Written by grant_publish for a topic with a key; the statement names only this key."
    return {"IAM5[Action::kms:GenerateDataKey*]": reason} if key else {}


ANY_INSTANCE = "IAM5[Resource::arn:<AWS::Partition>:ec2:<AWS::Region>:<AWS::AccountId>:instance/*]"
OWN_FLEET_REASONS = {
    "IAM5[Resource::arn:<AWS::Partition>:ec2:<AWS::Region>:<AWS::AccountId>"
    ":spot-fleet-request/*]": (
        "Limited by the tag Stack; naming the fleet would be a cycle, as the fleet needs the role."
    )
}
