"""The IAM role of a run's instances."""

from collections.abc import Sequence
from dataclasses import dataclass

from aws_cdk import Aws, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_s3_assets as s3_assets
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from contract.keys import ARTIFACTS, GUARD
from stacks import acknowledgments as nag
from stacks.fleet import may_end_fleet_of, own_fleet_reasons
from stacks.monitoring.metrics import metrics_namespace
from stacks.parameters import StackParameters
from stacks.permissions import allow, allow_metrics_in, deny, may_use_key_of, of_stack

# AWS's list for a role that has only this to do: docs.aws.amazon.com/systems-manager/latest/
# userguide/getting-started-add-permissions-to-existing-profile.html
SESSION_MANAGER = [
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
]


def may_terminate_itself(stack: Stack) -> iam.PolicyStatement:
    """Allow an instance of this stack to terminate itself, and no other.

    The key is the calling instance, the variable the one to be terminated. The common condition
    `aws:ARN = ${ec2:SourceInstanceARN}` never matches: no key has that name.
    """

    def instance(name: str) -> str:
        return stack.format_arn(service="ec2", resource="instance", resource_name=name)

    itself = {"ArnEquals": {"ec2:SourceInstanceARN": instance("${ec2:InstanceID}")}}
    conditions = {**itself, **of_stack(stack)}
    return allow("TerminateItself", ["ec2:TerminateInstances"], [instance("*")], conditions)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The places where a run reads and writes, and its customer-managed key, if any."""

    key: kms.IKey | None
    dataset_bucket: s3.IBucket
    dataset_prefix: str
    run_bucket: s3.IBucket
    run_prefix: str
    init_from: str = ""  # the URI of another run, with which a program's run begins

    @property
    def dataset_uri(self) -> str:
        return f"s3://{self.dataset_bucket.bucket_name}/{self.dataset_prefix}"

    @property
    def run_uri(self) -> str:
        return f"s3://{self.run_bucket.bucket_name}/{self.run_prefix}"

    @property
    def other_run(self) -> str:
        """Bucket and prefix of the run with which this one begins."""
        return f"{self.init_from.removeprefix('s3://').rstrip('/')}/"

    def statements(self, bundle: s3_assets.Asset) -> list[iam.PolicyStatement]:
        """Return an instance's permissions on its dataset, its run's prefix and its code bundle.

        Not grant_read, grant_put and grant_delete: these include versions of objects, which are
        the safety net, and tags, legal holds and the buckets' settings.
        """
        dataset = self.dataset_bucket.arn_for_objects(f"{self.dataset_prefix}/*")
        own = self.run_bucket.arn_for_objects(f"{self.run_prefix}/*")
        shared = self.run_bucket.arn_for_objects(f"{ARTIFACTS}*")
        # This bundle only: a run keeps a copy of the one that it began with.
        code = bundle.bucket.arn_for_objects(bundle.s3_object_key)
        other = [f"arn:{Aws.PARTITION}:s3:::{self.other_run}*"] if self.init_from else []
        buckets = [self.dataset_bucket.bucket_arn, self.run_bucket.bucket_arn]
        ledger = self.run_bucket.arn_for_objects(f"{self.run_prefix}/{GUARD}")
        write = ["s3:PutObject", "s3:AbortMultipartUpload"]
        return [
            allow("Read", ["s3:GetObject"], [dataset, own, shared, code, *other]),
            allow("WriteOwnRun", write, [own]),
            allow("DeleteOwnCheckpoints", ["s3:DeleteObject"], [own]),
            # A run must not write its own limits.
            deny("LeaveLedgerToGuard", ["s3:PutObject", "s3:DeleteObject"], [ledger]),
            # No delete: names contain checksums, and each run keeps a copy of what it read.
            allow("ShareDerivedData", write, [shared]),
            # Without it, S3 answers 403 instead of 404 for what does not exist yet; a condition on
            # the prefix would do the same, as a request for an object has none.
            allow("SeeWhatExists", ["s3:ListBucket"], buckets),
        ]


def named_buckets(
    scope: Construct, dataset_bucket_name: str, run_bucket_name: str, key_arn: str
) -> tuple[kms.IKey | None, s3.IBucket, s3.IBucket]:
    """Return key, dataset bucket and run bucket, exported by DatasetStack or named by the user.

    The buckets know the key, so that every grant on a bucket includes its key.
    """
    key = kms.Key.from_key_arn(scope, "DataKey", key_arn) if key_arn else None
    names = {"DatasetBucket": dataset_bucket_name, "RunBucket": run_bucket_name}
    dataset_bucket, run_bucket = (
        s3.Bucket.from_bucket_attributes(scope, each, bucket_name=name, encryption_key=key)
        for each, name in names.items()
    )
    return key, dataset_bucket, run_bucket


class InstanceRole(Construct):
    """The role of a training instance: read its dataset and bundle, write its own run.

    Each run has a role of its own: a role changed in place would take away the old run's
    permissions before its fleet and machine have ended.
    """

    role: iam.Role
    profile: iam.InstanceProfile

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        stack_parameters: StackParameters,
        data: RunData,
        bundle: s3_assets.Asset,
        parameters: Sequence[ssm.IStringParameter],
    ) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        of_run = Construct(self, stack_parameters.run_id)
        self.role = iam.Role(
            of_run,
            "Role",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            description="Training instances: read the dataset, write their own run",
        )
        self.profile = iam.InstanceProfile(of_run, "Profile", role=self.role)
        names = [each.parameter_arn for each in parameters]
        for statement in (
            *data.statements(bundle),
            allow("FindFleetAndBundle", ["ssm:GetParameter"], names),
            may_end_fleet_of(stack, stack_parameters),
            may_terminate_itself(stack),
            allow_metrics_in(metrics_namespace(stack.stack_name)),
            # Instead of SSH. The managed policy would let it read every parameter of the account.
            allow("SessionManager", SESSION_MANAGER, ["*"]),
        ):
            self.role.add_to_policy(statement)
        may_use_key_of(data.run_bucket, self.role)
        dataset, runs = data.dataset_bucket.bucket_name, data.run_bucket.bucket_name
        nag.acknowledge(
            self,
            {
                **own_fleet_reasons(self, stack_parameters),
                nag.any_instance(self): "Limited by a condition to the instance that asks.",
                "IAM5[Resource::*]": "PutMetricData and Session Manager's channels take no "
                "resources; a condition limits the metrics to the stack's own namespace.",
                nag.objects_in(self, dataset, f"{data.dataset_prefix}/"): "The manifest names "
                "the dataset's files, and is uploaded later.",
                nag.objects_in(self, runs, f"{data.run_prefix}/"): "The run's own prefix: "
                "checkpoints, artifacts, metrics and events are named during the run.",
                nag.objects_in(self, runs, ARTIFACTS): "Features and tokens that runs share are "
                "named by a hash of their inputs.",
            },
        )
        if data.init_from:
            reason = "The run with which this one begins: its files are named by their checksums."
            nag.acknowledge(self, {nag.objects_in(self, *data.other_run.split("/", 1)): reason})
