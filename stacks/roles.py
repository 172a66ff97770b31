"""IAM roles: one for the training instances, one for the Spot fleet."""

from aws_cdk import Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_s3_assets as s3_assets
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from contract.keys import ARTIFACTS
from stacks import acknowledgments as nag
from stacks.monitoring.metrics import metrics_namespace


def may_modify_fleet_of(stack: Stack) -> iam.PolicyStatement:
    """Allow setting the capacity of this stack's fleet only.

    By tag: a policy that named the fleet would be a cycle, because the fleet needs the role.
    """
    return iam.PolicyStatement(
        sid="ModifyOwnFleet",
        actions=["ec2:ModifySpotFleetRequest"],
        resources=[
            stack.format_arn(service="ec2", resource="spot-fleet-request", resource_name="*")
        ],
        conditions={"StringEquals": {"aws:ResourceTag/Stack": stack.stack_name}},
    )


def may_terminate_itself(stack: Stack) -> iam.PolicyStatement:
    """Allow an instance of this stack to terminate itself, and no other.

    The key is the instance that asks, the variable the one it asks for. The often seen condition
    `aws:ARN = ${ec2:SourceInstanceARN}` never matches: there is no key of that name.
    """

    def instance(name: str) -> str:
        return stack.format_arn(service="ec2", resource="instance", resource_name=name)

    return iam.PolicyStatement(
        sid="TerminateItself",
        actions=["ec2:TerminateInstances"],
        resources=[instance("*")],
        conditions={
            "ArnEquals": {"ec2:SourceInstanceARN": instance("${ec2:InstanceID}")},
            "StringEquals": {"aws:ResourceTag/Stack": stack.stack_name},
        },
    )


class InstanceRole(Construct):
    """What a training instance may do: read its dataset and bundle, write its own run."""

    role: iam.Role

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        dataset_bucket: s3.IBucket,
        dataset_prefix: str,
        run_bucket: s3.IBucket,
        run_prefix: str,
        bundle: s3_assets.Asset,
        fleet_parameter: ssm.IStringParameter,
    ) -> None:
        super().__init__(scope, construct_id)
        self.role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            description="Training instances: read the dataset, write their own run",
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name("AmazonSSMManagedInstanceCore")
            ],
        )
        dataset_bucket.grant_read(self.role, f"{dataset_prefix}/*")
        run_bucket.grant_read(self.role, f"{run_prefix}/*")
        run_bucket.grant_put(self.role, f"{run_prefix}/*")
        # Not grant_delete: it includes s3:DeleteObjectVersion, and old versions are the safety net.
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="DeleteOwnCheckpoints",
                actions=["s3:DeleteObject"],
                resources=[run_bucket.arn_for_objects(f"{run_prefix}/*")],
            )
        )
        # No delete here: names contain checksums, and each run keeps a copy of what it read.
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="ShareDerivedData",
                actions=["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"],
                resources=[run_bucket.arn_for_objects(f"{ARTIFACTS}*")],
            )
        )
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="PublishMetrics",
                actions=["cloudwatch:PutMetricData"],
                # The call takes no resources; the namespace limits it.
                resources=["*"],
                conditions={
                    "StringEquals": {
                        "cloudwatch:namespace": metrics_namespace(Stack.of(self).stack_name)
                    }
                },
            )
        )
        bundle.grant_read(self.role)
        fleet_parameter.grant_read(self.role)
        self.role.add_to_policy(may_modify_fleet_of(Stack.of(self)))
        self.role.add_to_policy(may_terminate_itself(Stack.of(self)))
        nag.acknowledge(
            self,
            {
                nag.managed_policy("AmazonSSMManagedInstanceCore"): "Session Manager in place of "
                "SSH; AWS keeps the policy in step with the agent.",
                **nag.bucket_grant_reasons(run_bucket),
                **nag.OWN_FLEET_REASONS,
                nag.ANY_INSTANCE: "Limited by a condition to the instance that asks.",
                "IAM5[Resource::*]": "PutMetricData takes no resources; a condition limits it to "
                "the stack's own namespace.",
                nag.objects_in(self, dataset_bucket.bucket_name, f"{dataset_prefix}/"): "The "
                "manifest names the dataset's files, and is uploaded later.",
                nag.objects_in(self, run_bucket.bucket_name, f"{run_prefix}/"): "The run's own "
                "prefix: checkpoints, artifacts, metrics and events are named during the run.",
                nag.objects_in(
                    self, run_bucket.bucket_name, ARTIFACTS
                ): "Features and tokens that runs share are named by a hash of their inputs.",
                nag.objects_in(self, bundle.s3_bucket_name): "A replacement uses the bundle "
                "that its run started with, whatever is deployed by then.",
            },
        )


class FleetRole(Construct):
    """What EC2 may do for the Spot fleet: start, tag and terminate its instances."""

    role: iam.Role

    def __init__(self, scope: Construct, construct_id: str) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        requests = stack.format_arn(
            service="ec2", resource="spot-fleet-request", resource_name="sfr-*"
        )
        policy = "service-role/AmazonEC2SpotFleetTaggingRole"
        self.role = iam.Role(
            self,
            "Role",
            # The conditions keep another account's fleet from using the role (confused deputy).
            assumed_by=iam.ServicePrincipal(
                "spotfleet.amazonaws.com",
                conditions={
                    "StringEquals": {"aws:SourceAccount": stack.account},
                    "ArnLike": {"aws:SourceArn": requests},
                },
            ),
            description="Spot fleet: start, tag and terminate instances",
            managed_policies=[iam.ManagedPolicy.from_aws_managed_policy_name(policy)],
        )
        nag.acknowledge(
            self,
            {nag.managed_policy(policy): "AWS maintains it for this role, along with the service."},
        )
