"""SweepStack: a queue of AWS Batch for the runs of sweeps, as SageMaker training jobs.

    npx cdk deploy SweepStack -c sweep.instances=4

While no job runs, its two alarms cost $0.20 a month. What Batch does: docs.aws.amazon.com/batch/
latest/userguide/service-jobs.html. Jobs read datasets and runs, and write below sweeps/ alone.
"""

from typing import Any

from aws_cdk import CfnOutput, Duration, Stack
from aws_cdk import aws_batch as batch
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sns as sns
from constructs import Construct

from contract.aws_limits import most
from contract.keys import RUNS, SWEEP, SWEEP_JOBS, SWEEPS
from contract.stack_names import DESCRIPTIONS, SHARED_QUEUE
from stacks import acknowledgments as nag
from stacks.events import TrainingTopic
from stacks.parameters import StackParameters
from stacks.parameters.fields import SweepQueue
from stacks.permissions import allow, allow_metrics_in, deny, may_use_key_of
from stacks.roles import named_buckets

JOB_TYPE = "SAGEMAKER_TRAINING"
# The group of all training jobs' logs, and the namespace of their metrics.
_SAGEMAKER = "/aws/sagemaker/TrainingJobs"
# How long the first job of the queue may fail to start, while all behind it wait: the longest that
# Batch allows. Batch acts only for one of its own reasons, which are these.
_FIRST_FOR_SECONDS = most("time-limit-seconds")
_REASONS = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE",
)
# This many failures in an hour are one mistake in all of them, not bad luck.
_FAILURES = 3


class SweepStack(Stack):
    """A queue with its limit and shares, its jobs' permissions, and who gets mail of its faults."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        dataset_bucket_name: str,
        run_bucket_name: str,
        key_arn: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, construct_id, description=DESCRIPTIONS["SweepStack"], **kwargs)
        key, dataset_bucket, run_bucket = named_buckets(
            self, dataset_bucket_name, run_bucket_name, key_arn
        )
        queue = self._queue(parameters.sweep)
        role = SweepJobRole(
            self,
            "JobRole",
            dataset_bucket=dataset_bucket,
            run_bucket=run_bucket,
            repository=parameters.sweep.repository,
        ).role
        topic = TrainingTopic(self, "Notifications", email=parameters.alarm.email, key=key).topic
        self._watch(queue.attr_job_queue_arn, topic)
        CfnOutput(self, "SweepQueue", value=queue.ref)
        CfnOutput(self, "SweepRole", value=role.role_arn)
        CfnOutput(self, "SweepsUri", value=f"s3://{run_bucket.bucket_name}/{SWEEPS}")

    def _queue(self, sweep: SweepQueue) -> batch.CfnJobQueue:
        """Create the queue: first in, first out; with shares, in order in each, shares in turn."""
        environment = batch.CfnServiceEnvironment(
            self,
            "Environment",
            service_environment_type=JOB_TYPE,
            capacity_limits=[
                batch.CfnServiceEnvironment.CapacityLimitProperty(
                    capacity_unit="NUM_INSTANCES", max_capacity=sweep.instances
                )
            ],
        )
        policy = self._shares(sweep) if sweep.shares else None
        return batch.CfnJobQueue(
            self,
            # A queue never gains or loses a policy: shares make another one.
            SHARED_QUEUE if policy else "Queue",
            job_queue_type=JOB_TYPE,
            priority=1,
            state="ENABLED",
            service_environment_order=[
                batch.CfnJobQueue.ServiceEnvironmentOrderProperty(
                    order=1, service_environment=environment.attr_service_environment_arn
                )
            ],
            scheduling_policy_arn=policy.attr_arn if policy else None,
            job_state_time_limit_actions=[
                batch.CfnJobQueue.JobStateTimeLimitActionProperty(
                    action="TERMINATE",
                    state="RUNNABLE",
                    max_time_seconds=_FIRST_FOR_SECONDS,
                    reason=reason,
                )
                for reason in _REASONS
            ],
        )

    def _shares(self, sweep: SweepQueue) -> batch.CfnSchedulingPolicy:
        shares = batch.CfnSchedulingPolicy
        return shares(
            self,
            "Shares",
            fairshare_policy=shares.FairsharePolicyProperty(
                # What ran in the last week counts against a share.
                share_decay_seconds=most("share-decay-seconds"),
                share_distribution=[
                    # Batch's weight is the reciprocal: half the weight gets twice the capacity.
                    shares.ShareAttributesProperty(
                        share_identifier=name, weight_factor=round(1 / parts, 4)
                    )
                    for name, parts in sweep.parts.items()
                ],
            ),
        )

    def _watch(self, queue_arn: str, topic: sns.ITopic) -> None:
        """Mail each event that needs a person; raise an alarm if they become many, or persist.

        Batch publishes no metrics of a queue; EventBridge counts a rule's events instead.
        """
        # Jobs ended by `runs stop` count as failed for Batch, too, but need no attention.
        failed = {"status": ["FAILED"], "isTerminated": [False, {"exists": False}]}
        self._alarm(
            ("Failed", "Batch Service Job State Change", failed),
            queue_arn,
            topic,
            name="ManyFail",
            least=_FAILURES,
            says=f"At least {_FAILURES} jobs of the queue have failed for good within an hour: "
            "that is one mistake in all of them. `runs stop` ends the sweep, saved; each job's "
            "FailureReason says why it failed, and `runs resume` queues it again, if its run has "
            "failed for good once `python -m training reopen` has reopened that.",
        )
        self._alarm(
            ("Blocked", "Batch Service Job Queue Blocked", {}),
            queue_arn,
            topic,
            name="QueueStands",
            least=1,
            says="The first job of the queue cannot start, so none behind it does: SageMaker has "
            "no capacity of that size, or the job requests more instances than sweep.instances; "
            "its statusReason says which. After a day Batch ends that job.",
        )

    def _alarm(
        self,
        rule: tuple[str, str, dict[str, Any]],
        queue_arn: str,
        topic: sns.ITopic,
        *,
        name: str,
        least: int,
        says: str,
    ) -> None:
        """Create a rule (its id, events, further detail to match), and an alarm on their count."""
        rule_id, detail_type, detail = rule
        made = events.Rule(
            self,
            rule_id,
            description=f"{detail_type} of the sweeps' queue, for people",
            event_pattern=events.EventPattern(
                source=["aws.batch"],
                detail_type=[detail_type],
                detail={"jobQueue": [queue_arn], **detail},
            ),
            targets=[targets.SnsTopic(topic)],
        )
        alarm = cloudwatch.Alarm(
            self,
            name,
            metric=cloudwatch.Metric(
                namespace="AWS/Events",
                metric_name="Invocations",
                dimensions_map={"RuleName": made.rule_name},
                statistic="Sum",
                period=Duration.hours(1),
            ),
            threshold=least,
            evaluation_periods=1,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
            alarm_description=f"{says} Missing data is healthy: there was no such event.",
        )
        alarm.add_alarm_action(actions.SnsAction(topic))


class SweepJobRole(Construct):
    """The role of a sweep's jobs: read datasets and runs, write below sweeps/, pull its image.

    https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html lists what SageMaker does
    with it.
    """

    role: iam.Role

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        dataset_bucket: s3.IBucket,
        run_bucket: s3.IBucket,
        repository: str,
    ) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        own = {"aws:SourceAccount": stack.account}
        self.role = iam.Role(
            self,
            "Role",
            description="Jobs of sweeps: read datasets and runs, write below sweeps/",
            assumed_by=iam.ServicePrincipal(
                "sagemaker.amazonaws.com", conditions={"StringEquals": own}
            ),
        )
        datasets = dataset_bucket.arn_for_objects("*")
        runs, sweeps = (run_bucket.arn_for_objects(f"{each}*") for each in (RUNS, SWEEPS))
        queued = [run_bucket.arn_for_objects(f"{SWEEPS}*/{each}") for each in (SWEEP, SWEEP_JOBS)]
        buckets = [dataset_bucket.bucket_arn, run_bucket.bucket_arn]
        images = stack.format_arn(service="ecr", resource="repository", resource_name=repository)
        groups = stack.format_arn(service="logs", resource=f"log-group:{_SAGEMAKER}:*")
        write = ["s3:PutObject", "s3:AbortMultipartUpload", "s3:DeleteObject"]
        pull = [
            "ecr:BatchCheckLayerAvailability",
            "ecr:BatchGetImage",
            "ecr:GetDownloadUrlForLayer",
        ]
        log = [
            "logs:CreateLogGroup",
            "logs:CreateLogStream",
            "logs:DescribeLogStreams",
            "logs:PutLogEvents",
        ]
        for statement in (
            allow("Read", ["s3:GetObject"], [datasets, runs, sweeps]),
            allow("WriteSweeps", write, [sweeps]),
            # `runs resume` submits what is in them, with the rights of who calls it.
            deny("LeaveJobsToOperators", ["s3:PutObject", "s3:DeleteObject"], queued),
            # Without it, S3 answers 403 instead of 404 for what does not exist yet.
            allow("SeeWhatExists", ["s3:ListBucket"], buckets),
            allow("PullImage", pull, [images]),
            # It takes no resource.
            allow("SignInToRegistry", ["ecr:GetAuthorizationToken"], ["*"]),
            allow("WriteLog", log, [groups]),
            allow_metrics_in(_SAGEMAKER),
        ):
            self.role.add_to_policy(statement)
        may_use_key_of(run_bucket, self.role)
        nag.acknowledge(
            self,
            {
                "IAM5[Resource::*]": "ECR's token and PutMetricData take no resources; a condition "
                "limits the metrics to SageMaker's namespace.",
                nag.objects_in(self, dataset_bucket.bucket_name): "Any dataset may be swept over.",
                nag.objects_in(self, run_bucket.bucket_name, RUNS): "A job may begin with any run.",
                nag.objects_in(self, run_bucket.bucket_name, SWEEPS): "The sweeps' own prefix: "
                "their runs are named when they are drawn.",
                nag.resource(self, "logs", f"log-group:{_SAGEMAKER}:*"): "SageMaker names a job's "
                "streams in its one group.",
            },
        )
