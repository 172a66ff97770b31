"""Acknowledged cdk-nag findings: each by its exact text, with the reason why it is wanted."""

import re
from collections.abc import Mapping

from aws_cdk import Acknowledgment, Stack, Validations
from aws_cdk import aws_s3 as s3
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


# The wildcard actions of Bucket.grant_read and Bucket.grant_put.
BUCKET_GRANT_REASONS = {
    f"IAM5[Action::s3:{action}]": "Written by grant_read and grant_put: all reads, and aborting an "
    "upload; the statement's resources limit it."
    for action in ("GetBucket*", "GetObject*", "List*", "Abort*")
}


def bucket_grant_reasons(bucket: s3.IBucket) -> dict[str, str]:
    """Return the findings of a grant on a bucket and on its customer-managed key, if any."""
    if bucket.encryption_key is None:
        return BUCKET_GRANT_REASONS
    return {
        **BUCKET_GRANT_REASONS,
        **{
            f"IAM5[Action::kms:{action}]": "Written by grant_put for a bucket with a key: the "
            "calls with and without plaintext; the statement names only this key."
            for action in ("ReEncrypt*", "GenerateDataKey*")
        },
    }


ANY_INSTANCE = "IAM5[Resource::arn:<AWS::Partition>:ec2:<AWS::Region>:<AWS::AccountId>:instance/*]"
OWN_FLEET_REASONS = {
    "IAM5[Resource::arn:<AWS::Partition>:ec2:<AWS::Region>:<AWS::AccountId>"
    ":spot-fleet-request/*]": (
        "Limited by the tag Stack; naming the fleet would be a cycle, as the fleet needs the role."
    )
}
