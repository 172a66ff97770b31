"""What a call that AWS denies is to the doctor: who has to allow it, and how."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError

from stacks.doctor.account import DeployTarget, Diagnosis, run
from stacks.parameters import StackParameters

IDENTITY_CENTER = "assumed-role/AWSReservedSSO_Dev_Team_0123456789abcdef/me@corp"


@pytest.mark.parametrize(
    ("who", "operation", "action", "fix"),
    [
        ("aws:sts::1:assumed-role/dev/me", "ListGrants", "kms:ListGrants", "aws iam put-role-pol"),
        # IAM refuses to change it.
        (
            f"aws:sts::1:{IDENTITY_CENTER}",
            "ListGrants",
            "kms:ListGrants",
            "add to permission set D",
        ),
        # Named by the message where the operation has another name.
        ("aws:sts::1:user/ada", "GetBucketEncryption", "s3:GetEncryptionConfiguration", "aws iam "),
        ("aws-us-gov:sts::1:user/ada", "GetObject", "s3:GetObject", "aws iam put-user-policy"),
        # An object's key, about which the deployer's policy says nothing.
        ("aws:sts::1:user/ada", "GetObject", "kms:Decrypt", "use credentials with the policy"),
    ],
)
def test_a_denied_call_is_allowed_where_that_can_be_done(
    who: str, operation: str, action: str, fix: str
) -> None:
    why = f"because no identity-based policy allows the {action} action"
    message = f"User: {who} is not authorized to perform: {action} on resource: x {why}"

    def check(_: DeployTarget) -> Iterator[Diagnosis]:
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": message}}, operation)

    client = SimpleNamespace(get_caller_identity=lambda: {"Arn": f"arn:{who}"})
    given = StackParameters.for_size("g5.xlarge", dataset_bucket="data-b", run_bucket="run-b")
    target = DeployTarget(client=lambda _: client, region="us-east-1", parameters=given)
    (found,) = run("any", check, target)
    assert found.state == "problem" and f"would have to allow {action}" in found.what
    assert found.fix.startswith(fix)
    if action != "kms:Decrypt":
        assert f'"{action}"' in found.fix
    if IDENTITY_CENTER in who:
        assert " Dev_Team's inline policy in IAM Identity Center: {" in found.fix
    if action == "s3:GetObject":
        assert "arn:aws-us-gov:s3:::data-b" in found.fix and "arn:aws:" not in found.fix
