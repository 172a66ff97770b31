"""Event routing: fleet events go to a log group and the Guard, fleet faults to people, notices and
rebalance recommendations to the Guard. No mail is sent about interruptions and replacements."""

from aws_cdk import Annotations, RemovalPolicy, Stack
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from stacks.fleet import KINDS, TrainingFleet

# These carry an instance id but no tag and no fleet id, so the rule matches the entire account's
# events, and the Guard ignores those of other instances. State changes of the own ones come as the
# fleet's "EC2 Spot Fleet Instance Change": launched, terminated, termination_notified (a decrease;
# EC2 user guide, Spot Fleet event types). The Guard's clock finds what has no such event: a machine
# that is stopped or of an older fleet, and what EC2, which does its best, did not send.
INSTANCE_EVENTS = (
    "EC2 Spot Instance Interruption Warning",
    "EC2 Instance Rebalance Recommendation",
)


class TrainingTopic(Construct):
    """The topic that people subscribe to; events and alarms may publish, over TLS only."""

    topic: sns.Topic

    def __init__(
        self, scope: Construct, construct_id: str, *, email: str, key: kms.IKey | None
    ) -> None:
        super().__init__(scope, construct_id)
        # Never alias/aws/sns: neither CloudWatch nor EventBridge may use that key.
        self.topic = sns.Topic(self, "Topic", enforce_ssl=True, master_key=key)
        if not email:
            Annotations.of(self).add_warning_v2(
                "notifications:email",
                "alarm.email is empty: no mail is sent when an alarm fires, or when the Guard "
                "stops the run or is not allowed to; set -c alarm.email=you@example.org",
            )
        else:
            # Nothing arrives until the recipient follows the link in AWS's confirmation e-mail.
            self.topic.add_subscription(subscriptions.EmailSubscription(email))
        # CDK's rule target adds the statement for EventBridge, without a condition: EventBridge
        # does not support aws:SourceAccount. CDK adds none for alarms, and without one their
        # messages would be lost without an error.
        self.topic.add_to_resource_policy(
            iam.PolicyStatement(
                sid="PublishAlarms",
                principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
                actions=["sns:Publish"],
                resources=[self.topic.topic_arn],
                conditions={"StringEquals": {"aws:SourceAccount": Stack.of(self).account}},
            )
        )


class InstanceEvents(Construct):
    """Wakes the Guard at notices and rebalance recommendations, of any instance."""

    def __init__(self, scope: Construct, construct_id: str, *, guard: lambda_.IFunction) -> None:
        super().__init__(scope, construct_id)
        events.Rule(
            self,
            "Rule",
            description="Notices and rebalances; the Guard picks those of its instances",
            event_pattern=events.EventPattern(
                source=["aws.ec2"], detail_type=list(INSTANCE_EVENTS)
            ),
            targets=[targets.LambdaFunction(guard)],
        )


class FleetEvents(Construct):
    """Sends the fleet's events to a log group and the Guard, and its faults to the topic."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        fleet: TrainingFleet,
        kind: str,
        topic: sns.ITopic,
        guard: lambda_.IFunction,
    ) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        pattern, fault = fleet.event_pattern, KINDS[kind].fault
        events.Rule(
            self,
            "Rule",
            description="Events of this stack's fleet, for the Guard",
            event_pattern=events.EventPattern(**pattern),
            targets=[targets.LambdaFunction(guard)],
        )
        for number, detail in enumerate(fault["details"], start=1):
            events.Rule(
                self,
                f"Faults{number}" if number > 1 else "Faults",
                description="Errors of this stack's fleet that need a person",
                event_pattern=events.EventPattern(
                    source=pattern["source"],
                    resources=pattern.get("resources"),
                    detail_type=fault["detail-type"],
                    detail={**pattern.get("detail", {}), **detail},
                ),
                targets=[targets.SnsTopic(topic)],
            )
        # The EventBridge console finds only log groups under this prefix.
        name = f"/aws/events/{stack.stack_name}"
        log_group = logs.LogGroup(
            self,
            "Log",
            log_group_name=name,
            retention=logs.RetentionDays.THREE_MONTHS,
            removal_policy=RemovalPolicy.DESTROY,
        )
        arn = stack.format_arn(service="logs", resource=f"log-group:{name}")
        # The group's own policy: a region has only ten policies that may name any group, a fixed
        # limit. Written by hand, like the rule, because CDK's target uses a custom resource.
        resource = log_group.node.default_child
        assert isinstance(resource, logs.CfnLogGroup)
        resource.resource_policy_document = _may_write_to(f"{arn}:*")
        rule = events.CfnRule(
            self,
            "LogRule",
            description="Events of this stack's fleet, for the record",
            event_pattern=pattern,
            state="ENABLED",
            targets=[events.CfnRule.TargetProperty(id="Log", arn=arn)],
        )
        rule.add_resource_dependency(resource)


def _may_write_to(log_group_arn: str) -> dict[str, object]:
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "FleetEvents",
                "Effect": "Allow",
                "Principal": {"Service": ["events.amazonaws.com", "delivery.logs.amazonaws.com"]},
                "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
                "Resource": log_group_arn,
            }
        ],
    }
