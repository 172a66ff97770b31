"""Checks of the VPC quota and of a given KMS key."""

import json
from collections.abc import Iterator

from botocore.exceptions import ClientError

from stacks.data_key import SERVICE_LINKED_ROLES
from stacks.doctor.account import Account, Finding

# VPCs per region; five unless raised.
_VPC_QUOTA = "L-F678F1CE"
_GRANTED = (
    "Encrypt Decrypt ReEncryptFrom ReEncryptTo GenerateDataKey GenerateDataKeyWithoutPlaintext "
    "DescribeKey CreateGrant"
)


def vpc_quota_suffices(account: Account) -> Iterator[Finding]:
    """Check that the VPC quota allows one more, unless the stack is deployed already."""
    if account.stack("TrainingStack"):
        return
    number = len(account.client("ec2").describe_vpcs()["Vpcs"])
    quota = account.client("service-quotas").get_service_quota(
        ServiceCode="vpc", QuotaCode=_VPC_QUOTA
    )["Quota"]["Value"]
    what = f"{number} of {quota:g} VPCs are in use in {account.region}"
    if number < quota:
        yield Finding(check="network", state="ok", what=what)
        return
    fix = (
        f"aws service-quotas request-service-quota-increase --service-code vpc --quota-code "
        f"{_VPC_QUOTA} --desired-value {number + 2} --region {account.region}"
    )
    yield Finding(check="network", state="problem", what=what, fix=fix)


def key_can_be_used(account: Account) -> Iterator[Finding]:
    """Check that a given key lets Spot create volumes and alarms publish."""
    arn = account.parameters.kms
    if not arn.startswith("arn:"):
        return
    if arn.split(":")[3] != account.region:
        what = f"{arn} is not in {account.region}"
        yield Finding(check="key", state="problem", what=what, fix=account.deploy() + " -c kms=")
        return
    kms = account.client("kms")
    try:
        state = kms.describe_key(KeyId=arn)["KeyMetadata"]["KeyState"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "NotFoundException":
            raise
        state = "missing"
    if state != "Enabled":
        fix = f"aws kms enable-key --key-id {arn} --region {account.region}"
        yield Finding(check="key", state="problem", what=f"{arn} is {state}", fix=fix)
        return
    policy = json.loads(kms.get_key_policy(KeyId=arn, PolicyName="default")["Policy"])
    text = json.dumps(policy)
    grantees = " ".join(each["GranteePrincipal"] for each in kms.list_grants(KeyId=arn)["Grants"])
    number = arn.split(":")[4]
    is_fine = True
    for role in SERVICE_LINKED_ROLES:
        if role not in text and role not in grantees:
            is_fine = False
            yield Finding(
                check="key",
                state="problem",
                what=f"neither policy nor grants name {role.rpartition('/')[2]}: instances would "
                "terminate at launch with Client.InternalError",
                fix=f"aws kms create-grant --key-id {arn} --operations {_GRANTED} "
                f"--grantee-principal arn:aws:iam::{number}:role/aws-service-role/{role} "
                f"--region {account.region}",
            )
    if "cloudwatch.amazonaws.com" not in text:
        is_fine = False
        yield Finding(
            check="key",
            state="problem",
            what="its policy does not allow cloudwatch.amazonaws.com and events.amazonaws.com "
            "kms:Decrypt and kms:GenerateDataKey*: alarms would be lost without an error",
            fix=f"aws kms put-key-policy --key-id {arn} --policy-name default --policy "
            "file://policy.json   # the current policy plus these two",
        )
    if is_fine:
        yield Finding(check="key", state="ok", what=f"Spot and alarms may use {arn}")
