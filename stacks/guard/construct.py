"""The Guard's function with its role, log group and schedule."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aws_cdk import Duration, IgnoreMode, RemovalPolicy, Stack
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sns as sns
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from contract.keys import BUDGETS, EVENTS, GUARD, SPOT_HISTORY
from sizing import service_prices
from stacks import acknowledgments as nag
from stacks.fleet import DESCRIBE, may_guard_fleet_of, own_fleet_reasons
from stacks.guard.fleet import ON_DEMAND, SPOT
from stacks.guard.tick import CALL_SECONDS
from stacks.monitoring.metrics import GUARD_PERIOD
from stacks.parameters import StackParameters
from stacks.permissions import allow, may_use_key_of, of_stack
from stacks.plan_at_synth import price_book

# With a deadline, the Guard reserves the time until its next call, so it is called more often.
PERIOD_WITH_DEADLINE = Duration.minutes(2)
# A schedule fires within the minute, and a call takes a moment.
LATE_SECONDS = 60
# The plan's restart time is modelled, so a deadline allows this multiple of it.
RESTART_MARGIN = 1.5
ROOT = Path(__file__).parents[2]
# Like a .gitignore: exclude everything, then re-include what the function imports.
EXCLUDED = (
    "/*",
    "!/contract",
    "/contract/report",
    "/contract/*.toml",
    "!/stacks",
    "/stacks/*",
    "!/stacks/__init__.py",
    "!/stacks/guard",
    "/stacks/guard/construct.py",
    "!/sizing",
    "/sizing/*",
    "!/sizing/__init__.py",
    "!/sizing/fallback",
    "__pycache__",
    "*.pyc",
)


class Guard(Construct):
    """Stops a run that no longer pays, and ends instances that run for nothing."""

    function: lambda_.Function
    clock: events.Rule

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        plan: Mapping[str, Any] | None,
        run_bucket: s3.IBucket,
        run_prefix: str,
        fleet_parameter: ssm.IStringParameter,
        topic: sns.ITopic,
        subnet_ids: Sequence[str] = (),
    ) -> None:
        super().__init__(scope, construct_id)
        log_group = logs.LogGroup(
            self,
            "Log",
            retention=logs.RetentionDays.ONE_MONTH,
            removal_policy=RemovalPolicy.DESTROY,
        )
        role = self._role(parameters, run_bucket, run_prefix, fleet_parameter)
        log_group.grant_write(role)
        topic.grant_publish(role)
        every = PERIOD_WITH_DEADLINE if parameters.deadline_hours else GUARD_PERIOD
        self.function = lambda_.Function(
            self,
            "Function",
            description="Stops a run that no longer pays, ends instances that run for nothing",
            runtime=lambda_.Runtime.PYTHON_3_14,
            architecture=lambda_.Architecture.ARM_64,
            handler="stacks.guard.handler.handler",
            code=lambda_.Code.from_asset(
                str(ROOT), exclude=list(EXCLUDED), ignore_mode=IgnoreMode.GIT
            ),
            role=role,
            log_group=log_group,
            memory_size=256,
            timeout=Duration.seconds(CALL_SECONDS),
            environment={
                "STACK_NAME": Stack.of(self).stack_name,
                "FLEET_PARAMETER": fleet_parameter.parameter_name,
                "RUN_BUCKET": run_bucket.bucket_name,
                "RUN_PREFIX": run_prefix,
                "TOPIC_ARN": topic.topic_arn,
                "MAX_BILLED_HOURS": f"{parameters.max_hours:g}",
                # In these three, 0 means no limit.
                "MAX_USD": f"{parameters.max_usd:g}",
                "MAX_WAIT_HOURS": f"{parameters.max_wait_hours:g}",
                "DEADLINE_HOURS": f"{parameters.deadline_hours:g}",
                "BUDGET_NAME": parameters.budget.name,
                "BUDGET_USD": f"{parameters.budget.usd:g}",
                "BUDGET_PERIOD": parameters.budget.period,
                "ON_DEMAND_BASE": str(parameters.on_demand_base),
                "CALL_EVERY_SECONDS": str(every.to_seconds() + LATE_SECONDS),
                "FORECAST": json.dumps(_forecast(plan)),
                "NOTICE_SECONDS": str(parameters.notice_budget_seconds),
                "USD_PER_HOUR": json.dumps(self._prices(parameters)),
                "SUBNETS": ",".join(subnet_ids),
                "STORAGE_USD_PER_HOUR": f"{self._storage_usd_per_hour(parameters):.6f}",
                "HEARTBEAT_TIMEOUT_SECONDS": str(parameters.guard.heartbeat_timeout_seconds),
                "MAX_BARREN_ATTEMPTS": str(parameters.guard.max_barren_attempts),
            },
        )
        self.clock = events.Rule(
            self,
            "Clock",
            description="Wakes the Guard",
            schedule=events.Schedule.rate(every),
            targets=[targets.LambdaFunction(self.function)],
        )

    def _role(
        self,
        parameters: StackParameters,
        run_bucket: s3.IBucket,
        run_prefix: str,
        fleet_parameter: ssm.IStringParameter,
    ) -> iam.Role:
        """Create the role that reads the run, keeps the Guard's ledger and stops the fleet."""
        role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
            description="Guard: read the run, stop this stack's fleet, end its instances",
        )
        stack, bucket = Stack.of(self), run_bucket.bucket_arn
        pools = run_bucket.arn_for_objects(SPOT_HISTORY)
        instances = stack.format_arn(service="ec2", resource="instance", resource_name="*")
        # EC2's Describe calls take no resources.
        calls = ("DescribeInstances", "DescribeSpotPriceHistory", "DescribeSubnets")
        see = [*DESCRIBE, *(f"ec2:{name}" for name in calls)]
        own, ledger, records = (
            run_bucket.arn_for_objects(f"{run_prefix}/{name}")
            for name in ("*", GUARD, f"{EVENTS}*")
        )
        for statement in (
            allow("ReadRun", ["s3:GetObject"], [own, pools]),
            allow("SeeWhatExists", ["s3:ListBucket", "s3:ListBucketVersions"], [bucket]),
            allow("ReadOlderLedger", ["s3:GetObjectVersion"], [ledger]),
            allow("WriteLedgerAndEvents", ["s3:PutObject"], [ledger, records, pools]),
            allow("FindOwnFleet", ["ssm:GetParameter"], [fleet_parameter.parameter_arn]),
            *may_guard_fleet_of(stack, parameters),
            allow("EndOwnInstances", ["ec2:TerminateInstances"], [instances], of_stack(stack)),
            allow("SeeFleetAndInstances", see, ["*"]),
        ):
            role.add_to_policy(statement)
        budget = f"{BUDGETS}{parameters.budget.name}/"
        if parameters.budget.name:
            keep = [f"s3:{name}" for name in ("GetObject", "GetObjectVersion", "PutObject")]
            objects = run_bucket.arn_for_objects(f"{budget}*")
            role.add_to_policy(allow("KeepBudget", keep, [objects]))
        may_use_key_of(run_bucket, role)
        nag.acknowledge(
            role,
            {
                **own_fleet_reasons(self, parameters),
                nag.any_instance(
                    self
                ): "Limited by the tag Stack; instances get their ids in the run.",
                nag.resource(
                    self, "ec2", "subnet/*", account="*"
                ): "Only of the own fleet, which is limited by its tag; a subnet may be shared.",
                **nag.publish_reasons(run_bucket.encryption_key),
                "IAM5[Resource::*]": "EC2's Describe calls take no resources.",
                nag.objects_in(self, run_bucket.bucket_name, f"{run_prefix}/"): "It reads the head "
                "and the dates of checkpoints, which are named during the run.",
                nag.objects_in(
                    self, run_bucket.bucket_name, f"{run_prefix}/{EVENTS}"
                ): "An event's name starts with its time.",
                nag.objects_in(
                    self, run_bucket.bucket_name, budget
                ): "A budget's object is named after its day, month or year.",
            },
        )
        return role

    def _prices(self, parameters: StackParameters) -> dict[str, dict[str, float]]:
        """Return dollars per hour by size and market, the stack's own size first, as planned."""
        book = price_book(Stack.of(self), parameters)
        return {
            size: {SPOT: spot.usd_per_hour, ON_DEMAND: on_demand.usd_per_hour}
            for size in parameters.sizes
            for on_demand, spot in [book.require(size)]
        }

    def _storage_usd_per_hour(self, parameters: StackParameters) -> float:
        """Return the hourly cost of a machine's volumes and of its public address, if any.

        Outside us-east-1, volume prices are scaled like the instance's price (modelled).
        """
        data, here = parameters.data_volume, parameters.instance.on_demand_usd_per_hour
        volumes = service_prices.ebs_usd_per_hour(parameters.root_volume.gib, 0, 0)
        if parameters.data_on == "ebs":
            volumes += service_prices.ebs_usd_per_hour(data.gib, data.iops, data.mib_per_second)
        there, _ = price_book(Stack.of(self), parameters).require(parameters.size)
        address = 0.0 if parameters.vpc else service_prices.PUBLIC_IPV4_USD_PER_HOUR
        return address + volumes * there.usd_per_hour / (here or there.usd_per_hour)


def _forecast(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the plan's figures for choosing between Spot and on demand (see settings.py)."""
    if plan is None:
        return None
    return {
        "stages": {stage["stage"]: stage["seconds"] for stage in plan["stages"]},
        "slow_stages": {
            stage["stage"]: round(stage["seconds"] * _slowness(stage), 1)
            for stage in plan["stages"]
        },
        "restart_seconds": round(plan["restart_seconds"] * RESTART_MARGIN, 1),
        "save_seconds": plan["checkpoint_seconds"],
        "interval_seconds": plan["checkpoint_interval_seconds"] or 0.0,
    }


def _slowness(stage: Mapping[str, Any]) -> float:
    """Return how many times longer a stage takes if its steps are as slow as similar runs' p90."""
    slow, usual = stage["step_seconds_p90"], stage["step_seconds"]
    return max(1.0, slow / usual) if slow and usual else 1.0
