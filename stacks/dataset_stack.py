"""DatasetStack: the dataset bucket and the run bucket, which outlive every training stack.

Buckets given with -c dataset_bucket= or -c run_bucket= are adopted: used, but not managed here.
-c kms=create adds a customer-managed key, -c access_logs=true keeps access logs.
"""

from typing import Any

from aws_cdk import CfnOutput, Duration, RemovalPolicy, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from contract.keys import ARTIFACTS, HEAD, RUNS
from contract.stack_names import DESCRIPTIONS
from stacks import acknowledgments as nag
from stacks.data_key import DataKey
from stacks.parameters import StackParameters
from stacks.parameters.checks import NEW_KEY

_NO_ACCESS_LOGS = (
    "Server access logs double the number of objects, and most training projects never read "
    "them; -c access_logs=true keeps them where an audit requires them."
)
ACCESS_LOGS_KEPT = Duration.days(90)
# In the run bucket, next to runs/: derived data that runs share. Each run keeps a copy of what it
# reads, so expired data only has to be made again if a later run needs it.
SHARED_ARTIFACTS_KEPT = Duration.days(90)


class DatasetStack(Stack):
    """Keeps what cannot be recreated: datasets, and the runs with their checkpoints."""

    dataset_bucket_name: str
    run_bucket_name: str
    key_arn: str

    def __init__(
        self, scope: Construct, construct_id: str, *, parameters: StackParameters, **kwargs: Any
    ) -> None:
        super().__init__(
            scope,
            construct_id,
            description=DESCRIPTIONS["DatasetStack"],
            termination_protection=True,
            **kwargs,
        )
        # Else CDK opens the logs' bucket by an ACL, which our buckets refuse; an importing app may
        # lack the flag.
        self.node.set_context("@aws-cdk/aws-s3:serverAccessLogsUseBucketPolicy", True)
        self.dataset_bucket_name = parameters.dataset_bucket
        self.run_bucket_name = parameters.run_bucket
        self.key_arn = parameters.kms
        self._versions_kept_days = parameters.versions_kept_days
        self._key = self._data_key(parameters.kms)
        self._access_logs = self._logs_bucket() if parameters.access_logs else None
        if not parameters.dataset_bucket:
            dataset_bucket = self._kept_bucket("DatasetBucket", is_versioned=False)
            self.dataset_bucket_name = self._export(dataset_bucket)
        if not parameters.run_bucket:
            run_bucket = self._kept_bucket("RunBucket", is_versioned=True)
            run_bucket.add_to_resource_policy(_only_conditional_heads(run_bucket))
            run_bucket.add_lifecycle_rule(
                id="DropSharedArtifacts", prefix=ARTIFACTS, expiration=SHARED_ARTIFACTS_KEPT
            )
            self.run_bucket_name = self._export(run_bucket)

    def _data_key(self, wanted: str) -> kms.IKey | None:
        if wanted == NEW_KEY:
            key = DataKey(self, "DataKey").key
            self.key_arn = self.export_value(key.key_arn)
            return key
        return kms.Key.from_key_arn(self, "DataKey", wanted) if wanted else None

    def _logs_bucket(self) -> s3.Bucket:
        rule = s3.LifecycleRule(id="DropOldAccessLogs", expiration=ACCESS_LOGS_KEPT)
        # S3 delivers access logs only to buckets with S3-managed encryption.
        managed = s3.BucketEncryption.S3_MANAGED
        return self._closed_bucket("AccessLogs", encryption=managed, lifecycle_rules=[rule])

    def _kept_bucket(self, construct_id: str, *, is_versioned: bool) -> s3.Bucket:
        versions_kept = Duration.days(self._versions_kept_days)
        rule = s3.LifecycleRule(
            id="DropWhatNobodyCanRead",
            abort_incomplete_multipart_upload_after=Duration.days(1),
            noncurrent_version_expiration=versions_kept if is_versioned else None,
            # In a versioned bucket, an expired object leaves a delete marker forever.
            expired_object_delete_marker=True if is_versioned else None,
        )
        encryption = s3.BucketEncryption.KMS if self._key else s3.BucketEncryption.S3_MANAGED
        bucket = self._closed_bucket(
            construct_id,
            encryption=encryption,
            encryption_key=self._key,
            # One KMS call for many objects instead of one each.
            bucket_key_enabled=True if self._key else None,
            server_access_logs_bucket=self._access_logs,
            server_access_logs_prefix=f"{construct_id}/" if self._access_logs else None,
            versioned=is_versioned,
            lifecycle_rules=[rule],
        )
        if self._access_logs is None:
            nag.acknowledge(bucket, {"S1": _NO_ACCESS_LOGS})
        CfnOutput(self, f"{construct_id}Name", value=bucket.bucket_name)
        return bucket

    def _closed_bucket(self, construct_id: str, **more: Any) -> s3.Bucket:
        """Create a bucket that nobody can open to the public, and that outlives the stack."""
        bucket = s3.Bucket(
            self,
            construct_id,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            removal_policy=RemovalPolicy.RETAIN,
            **more,
        )
        # A kept bucket without its policy would accept plain HTTP and unconditional heads.
        assert bucket.policy is not None
        bucket.policy.apply_removal_policy(RemovalPolicy.RETAIN)
        return bucket

    def _export(self, bucket: s3.IBucket) -> str:
        """Export name and ARN, and return the name as other stacks import it.

        Always exported, even when no stack imports them: otherwise CloudFormation would refuse a
        deploy that drops a reference, because the deployed template still uses the export.
        """
        self.export_value(bucket.bucket_arn)
        return self.export_value(bucket.bucket_name)


def _only_conditional_heads(bucket: s3.IBucket) -> iam.PolicyStatement:
    """Deny every put on a head.json that has neither If-Match nor If-None-Match.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html exempts
    multipart uploads; this policy does not, so they are denied as well.
    """
    return iam.PolicyStatement(
        sid="DenyUnconditionalHeads",
        effect=iam.Effect.DENY,
        principals=[iam.AnyPrincipal()],
        actions=["s3:PutObject"],
        resources=[bucket.arn_for_objects(f"{RUNS}*/{HEAD}")],
        conditions={"Null": {"s3:if-match": "true", "s3:if-none-match": "true"}},
    )
