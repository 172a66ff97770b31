"""TrainingStack: one run's fleet and all around it; disposable, everything kept is in S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aws_cdk import CfnOutput, Stack, Tags
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from stacks import user_data
from stacks.bundle import CodeBundle
from stacks.events import FleetEvents, InstanceEvents, TrainingTopic
from stacks.fleet import TrainingFleet
from stacks.guard.construct import Guard
from stacks.launch_template import TrainingLaunchTemplate
from stacks.monitoring.alarms import TrainingAlarms
from stacks.monitoring.dashboard import TrainingDashboard
from stacks.monitoring.metrics import RunMetrics
from stacks.network import Network
from stacks.parameters import StackParameters
from stacks.plan import annotate
from stacks.roles import FleetRole, InstanceRole

ROOT = Path(__file__).parent.parent


class TrainingStack(Stack):
    """Trains one run to its end on Spot instances, then costs nothing."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        dataset_bucket_name: str,
        run_bucket_name: str,
        key_arn: str,
        first_boot: str,
        bundle_root: Path = ROOT,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            scope,
            construct_id,
            description="Trains one run on Spot instances that may be interrupted at any time.",
            **kwargs,
        )
        Tags.of(self).add("Stack", self.stack_name)
        self.plan = annotate(self, parameters)
        # By name, whether DatasetStack exports it or the user gave it: one way for both. With the
        # key, so that every grant on a bucket is one on its key too.
        key = kms.Key.from_key_arn(self, "DataKey", key_arn) if key_arn else None
        dataset_bucket, run_bucket = (
            s3.Bucket.from_bucket_attributes(
                self, construct_id, bucket_name=name, encryption_key=key
            )
            for construct_id, name in (
                ("DatasetBucket", dataset_bucket_name),
                ("RunBucket", run_bucket_name),
            )
        )
        run_prefix = f"runs/{parameters.run_id}"
        dataset_uri = f"s3://{dataset_bucket.bucket_name}/{parameters.dataset}"
        run_uri = f"s3://{run_bucket.bucket_name}/{run_prefix}"
        parameter_name = f"/{self.stack_name}/fleet-id"
        # By its name, which is known before the fleet is: role and Guard come first.
        fleet_parameter = ssm.StringParameter.from_string_parameter_attributes(
            self, "FleetParameter", parameter_name=parameter_name, force_dynamic_reference=True
        )

        network = Network(self, "Network", zones=parameters.zones)
        bundle = CodeBundle(self, "Bundle", root=bundle_root)
        instance_role = InstanceRole(
            self,
            "InstanceRole",
            dataset_bucket=dataset_bucket,
            dataset_prefix=parameters.dataset,
            run_bucket=run_bucket,
            run_prefix=run_prefix,
            bundle=bundle,
            fleet_parameter=fleet_parameter,
        )
        run_env = user_data.run_env(
            parameters,
            dataset_uri=dataset_uri,
            run_uri=run_uri,
            bundle_uri=bundle.s3_object_url,
            stack_name=self.stack_name,
            region=self.region,
            fleet_parameter=parameter_name,
        )
        launch_template = TrainingLaunchTemplate(
            self,
            "LaunchTemplate",
            parameters=parameters,
            role=instance_role.role,
            security_group=network.security_group,
            key=key,
            user_data=user_data.render(run_env, first_boot),
        )
        topic = TrainingTopic(self, "Notifications", email=parameters.alarm_email, key=key).topic
        guard = Guard(
            self,
            "Guard",
            parameters=parameters,
            run_bucket=run_bucket,
            run_prefix=run_prefix,
            fleet_parameter=fleet_parameter,
            topic=topic,
        )
        instance_events = InstanceEvents(self, "InstanceEvents", guard=guard.function)
        fleet_role = FleetRole(self, "FleetRole")
        fleet = TrainingFleet(
            self,
            "Fleet",
            parameters=parameters,
            launch_template=launch_template.template,
            subnets=network.vpc.public_subnets,
            role=fleet_role.role,
            parameter_name=parameter_name,
        )
        # A Spot fleet refers to subnets and roles only: without these its first instance could
        # boot before it can reach S3, before it may, or before anybody guards it.
        fleet.node.add_dependency(network.route, instance_role, guard, instance_events)
        FleetEvents(
            self, "FleetEvents", fleet_arn=fleet.fleet_arn, topic=topic, guard=guard.function
        )
        metrics = RunMetrics(
            stack_name=self.stack_name,
            fleet_id=fleet.fleet_id,
            guard_name=guard.function.function_name,
        )
        alarms = TrainingAlarms(
            self, "Alarms", parameters=parameters, metrics=metrics, topic=topic
        ).alarms
        TrainingDashboard(
            self, "Overview", run_id=parameters.run_id, metrics=metrics, alarms=alarms
        )
        outputs = {
            "DatasetUri": dataset_uri,
            "RunUri": run_uri,
            "FleetIdOutput": fleet.fleet_id,
            "TopicArn": topic.topic_arn,
        }
        for name, value in outputs.items():
            CfnOutput(self, name, value=value)
