"""A customer-managed key for buckets, volumes and the topic, with the policy that services need.

An existing key (-c kms=ARN) needs the same statements in its policy. To print them, for the key's
own account or for another one: python -m stacks.data_key KEY_ARN [ACCOUNT]
"""

import json
import re
import sys

from aws_cdk import App, RemovalPolicy, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import Construct

from stacks.permissions import allow

# The service-linked roles that start each kind of fleet's instances and create their encrypted
# volumes. A key admits all of them: it outlives a change of kind.
SERVICE_LINKED_ROLES = {
    "spot": (
        "spotfleet.amazonaws.com/AWSServiceRoleForEC2SpotFleet",
        "spot.amazonaws.com/AWSServiceRoleForEC2Spot",
    ),
    "asg": (
        "autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling",
        "spot.amazonaws.com/AWSServiceRoleForEC2Spot",
    ),
}
_USE = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]


class DataKey(Construct):
    """A key that is kept: without it, nothing that it encrypted could be read again.

    One of a first deploy that fails goes with the rest: it has encrypted nothing, and costs.
    """

    key: kms.Key

    def __init__(self, scope: Construct, construct_id: str) -> None:
        super().__init__(scope, construct_id)
        self.key = kms.Key(
            self,
            "Key",
            description="Datasets, runs, training volumes and notifications",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
        )
        stack = Stack.of(self)
        for statement in service_statements(stack.partition, stack.account):
            self.key.add_to_resource_policy(statement)


def service_statements(partition: str, account: str) -> list[iam.PolicyStatement]:
    """Return the key policy statements that these stacks need besides the administrators' rights.

    Without the first two, instances terminate at launch with Client.InternalError; without the
    last, alarms and events are lost without an error.
    """
    roles = [
        f"arn:{partition}:iam::{account}:role/aws-service-role/{name}"
        for name in dict.fromkeys(name for each in SERVICE_LINKED_ROLES.values() for name in each)
    ]
    # By condition, not as principals: KMS refuses a policy that names a role which does not exist
    # yet, and an account gets these roles only when it first needs them.
    spot = {"StringEquals": {"kms:CallerAccount": account}, "ArnLike": {"aws:PrincipalArn": roles}}
    attached = {**spot, "Bool": {"kms:GrantIsForAWSResource": "true"}}
    services = [iam.ServicePrincipal(f"{name}.amazonaws.com") for name in ("cloudwatch", "events")]
    use = ["kms:Decrypt", "kms:GenerateDataKey*"]
    return [
        _by(allow("SpotMakesVolumes", _USE, ["*"], spot), iam.AnyPrincipal()),
        _by(allow("SpotAttachesVolumes", ["kms:CreateGrant"], ["*"], attached), iam.AnyPrincipal()),
        # Not limited to this account's alarms: the topic's own policy does that.
        _by(allow("AlarmsAndEventsPublish", use, ["*"]), *services),
    ]


def _by(statement: iam.PolicyStatement, *who: iam.IPrincipal) -> iam.PolicyStatement:
    statement.add_principals(*who)
    return statement


def main(arguments: list[str]) -> int:
    """Print the statements for an existing key."""
    arn = r"arn:(aws[\w-]*):kms:[\w-]+:(\d{12}):key/\S+"
    found = re.fullmatch(rf"{arn}(?: (\d{{12}}))?", " ".join(arguments))
    if not found:
        print("usage: python -m stacks.data_key KEY_ARN [ACCOUNT]", file=sys.stderr)
        return 2
    account = found[3] or found[2]
    statements = service_statements(found[1], account)
    if account != found[2]:
        # A policy alone opens a key to no role of another account: that account then grants it.
        root = iam.ArnPrincipal(f"arn:{found[1]}:iam::{account}:root")
        actions = [*_USE, "kms:CreateGrant", "kms:ListGrants"]
        statements[:2] = [_by(allow("AccountUses", actions, ["*"]), root)]
    # A service principal is a token until a stack resolves it.
    stack = Stack(App(), "Key")
    resolved = [stack.resolve(each.to_statement_json()) for each in statements]
    print(json.dumps(resolved, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
