"""DatasetStack: the dataset bucket and the run bucket, which outlive every training stack.

Buckets given with -c dataset_bucket= or -c run_bucket= are adopted: used, but not managed here.
"""

from __future__ import annotations

from typing import Any

from aws_cdk import CfnOutput, Duration, RemovalPolicy, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from constructs import Construct

from stacks import acknowledgments as nag
from stacks.parameters import StackParameters

_NO_ACCESS_LOGS = (
    "Server access logs double the number of objects and nobody reads them in a training project; "
    "CloudTrail data events can be switched on for an audit without a change here."
)


class DatasetStack(Stack):
    """Keeps what cannot be made again: datasets, and the runs with their checkpoints."""

    dataset_bucket_name: str
    run_bucket_name: str

    def __init__(
        self, scope: Construct, construct_id: str, *, parameters: StackParameters, **kwargs: Any
    ) -> None:
        super().__init__(
            scope,
            construct_id,
            description="Datasets and training runs; kept when the training stack is destroyed.",
            termination_protection=True,
            **kwargs,
        )
        self.dataset_bucket_name = parameters.dataset_bucket
        self.run_bucket_name = parameters.run_bucket
        if not parameters.dataset_bucket:
            dataset_bucket = self._kept_bucket("DatasetBucket", is_versioned=False)
            self.dataset_bucket_name = self._export(dataset_bucket)
        if not parameters.run_bucket:
            run_bucket = self._kept_bucket("RunBucket", is_versioned=True)
            run_bucket.add_to_resource_policy(_only_conditional_heads(run_bucket))
            self.run_bucket_name = self._export(run_bucket)

    def _kept_bucket(self, construct_id: str, *, is_versioned: bool) -> s3.Bucket:
        bucket = s3.Bucket(
            self,
            construct_id,
            encryption=s3.BucketEncryption.S3_MANAGED,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            versioned=is_versioned,
            removal_policy=RemovalPolicy.RETAIN,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="DropWhatNobodyCanRead",
                    abort_incomplete_multipart_upload_after=Duration.days(1),
                    noncurrent_version_expiration=Duration.days(1) if is_versioned else None,
                    # With versions, an expired object leaves a delete marker behind for ever.
                    expired_object_delete_marker=True if is_versioned else None,
                )
            ],
        )
        # A kept bucket without its policy would accept plain HTTP and unconditional heads.
        assert bucket.policy is not None
        bucket.policy.apply_removal_policy(RemovalPolicy.RETAIN)
        nag.acknowledge(bucket, {"S1": _NO_ACCESS_LOGS})
        CfnOutput(self, f"{construct_id}Name", value=bucket.bucket_name)
        return bucket

    def _export(self, bucket: s3.IBucket) -> str:
        """Export name and ARN, and return the name as other stacks import it.

        Exported whether or not a stack imports them at the moment: otherwise the deploy that drops
        a reference would be refused while the deployed template still uses the export.
        """
        self.export_value(bucket.bucket_arn)
        return self.export_value(bucket.bucket_name)


def _only_conditional_heads(bucket: s3.IBucket) -> iam.PolicyStatement:
    """Deny every put on a head.json that has neither If-Match nor If-None-Match.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html; the
    exemption of multipart uploads that it shows is left out, so these are denied as well.
    """
    return iam.PolicyStatement(
        sid="DenyUnconditionalHeads",
        effect=iam.Effect.DENY,
        principals=[iam.AnyPrincipal()],
        actions=["s3:PutObject"],
        resources=[bucket.arn_for_objects("runs/*/head.json")],
        conditions={"Null": {"s3:if-match": "true", "s3:if-none-match": "true"}},
    )
