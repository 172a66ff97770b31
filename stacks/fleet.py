"""The fleet of either kind, who may do what with it, and what AWS calls its events and metrics.

Everything in the templates that depends on the kind of fleet; guard/fleet.py has the Guard's calls
and commands, docs/fleets.md what differs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aws_cdk import Annotations, ArnFormat, CfnResource, Stack
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from contract.stack_names import NEW_GROUP, ON_DEMAND_GROUP
from stacks import acknowledgments as nag
from stacks.parameters import StackParameters
from stacks.permissions import allow, of_stack

RESOURCE = "spot-fleet-request"
# Of both kinds: while a deploy changes the kind, machines of the old fleet still run.
DESCRIBE = ("ec2:DescribeSpotFleetRequests", "autoscaling:DescribeAutoScalingGroups")


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetKind:
    """What AWS calls one kind of fleet: in IAM, EventBridge and CloudWatch."""

    service: str
    resource: str
    modify: Sequence[str]
    zero: Mapping[str, Mapping[str, str]]  # the condition of a request for nothing
    cancel: str
    source: str
    # Of the errors that only a person can fix: permissions, quota, configuration, a volume's key.
    fault: Mapping[str, Any]
    namespace: str
    dimension: str
    wanted: str
    running: str
    kept: Sequence[str] = ()  # how many of those wanted only stay until they are ended


KINDS: Mapping[str, FleetKind] = {
    "spot": FleetKind(
        service="ec2",
        resource=f"{RESOURCE}/",
        modify=["ec2:ModifySpotFleetRequest"],
        # IfExists: the reference lists these keys for the call, but nothing public shows that EC2
        # sets them. If it does not, the condition must not keep a finished run from going to zero.
        zero={
            "StringEqualsIfExists": {
                f"ec2:Attribute/{name}": "0"
                for name in ("TargetCapacity", "OnDemandTargetCapacity")
            }
        },
        cancel="ec2:CancelSpotFleetRequests",
        source="aws.ec2spotfleet",
        # EC2's fourth error, allLaunchSpecsTemporarilyBlacklisted, and its words of capacity, for
        # which it has the third one's name, repeat: the alarm FleetBelowTarget reports them once.
        fault={
            "detail-type": ["EC2 Spot Fleet Error"],
            "details": [
                {"sub-type": ["iamFleetRoleInvalid", "spotInstanceCountLimitExceeded"]},
                {
                    "sub-type": ["spotFleetRequestConfigurationInvalid"],
                    "description": [{"anything-but": {"wildcard": "*capacity*"}}],
                },
            ],
        },
        namespace="AWS/EC2Spot",
        dimension="FleetRequestId",
        wanted="TargetCapacity",
        running="FulfilledCapacity",
    ),
    "asg": FleetKind(
        service="autoscaling",
        resource="autoScalingGroup:*:autoScalingGroupName/",
        modify=["autoscaling:UpdateAutoScalingGroup", "autoscaling:ResumeProcesses"],
        zero={"NumericEquals": {"autoscaling:MaxSize": "0"}},
        cancel="autoscaling:DeleteAutoScalingGroup",
        source="aws.autoscaling",
        # Its other messages are of capacity (InsufficientInstanceCapacity, UnfulfillableCapacity,
        # SpotMaxPriceTooLow), or new to us: FleetBelowTarget reports these.
        fault={
            "detail-type": ["EC2 Instance Launch Unsuccessful"],
            # Three wildcards each: EventBridge refuses more ("Rule is too complex").
            "details": [
                {"StatusMessage": [{"wildcard": f"*{text}*"} for text in texts]}
                for texts in (
                    ("MaxSpotInstanceCountExceeded", "instance count exceeded", "vCPU limit"),
                    ("not authorized", "do not have permission", "does not exist"),
                    ("enough free addresses", "being validated", "verification"),
                    ("blocked", "Invalid", "Client.InternalError"),
                )
            ],
        },
        namespace="AWS/AutoScaling",
        dimension="AutoScalingGroupName",
        wanted="GroupDesiredCapacity",
        running="GroupInServiceInstances",
        kept=["GroupMinSize"],
    ),
}


def fleet_arn(stack: Stack, kind: FleetKind, name: str = "*") -> str:
    """Return the ARN of one fleet, or of any in the stack's account and region."""
    return stack.format_arn(
        service=kind.service, resource=kind.resource + name, arn_format=ArnFormat.NO_RESOURCE_NAME
    )


def may_end_fleet_of(stack: Stack, parameters: StackParameters) -> iam.PolicyStatement:
    """Allow a run's machine to set its own fleet's capacity only, to zero.

    By tag: a policy that named the fleet would be a cycle, because the fleet needs the role. While
    a deploy replaces the fleet, the old run's machine reads the new fleet's id from the parameter.
    """
    kind = KINDS[parameters.fleet]
    conditions = {**of_stack(stack, RunId=parameters.run_id), **kind.zero}
    return allow("ModifyOwnFleet", [kind.modify[0]], [fleet_arn(stack, kind)], conditions)


def may_guard_fleet_of(stack: Stack, parameters: StackParameters) -> Iterator[iam.PolicyStatement]:
    """Allow the Guard to change this stack's fleet only, by tag; and to cancel it if that fails."""
    kind, own = KINDS[parameters.fleet], of_stack(stack)
    changed = [fleet_arn(stack, kind)]
    if kind.service == "ec2":
        # Its pools are the launch template and subnets, which another account may share.
        ec2_arn = f"arn:{stack.partition}:ec2:{stack.region}"
        changed.append(f"{ec2_arn}:{stack.account}:launch-template/*")
        yield allow("OfferSubnets", [*kind.modify], [f"{ec2_arn}:*:subnet/*"])
    yield allow("ModifyOwnFleet", [*kind.modify], changed, own)
    yield allow("CancelOwnFleet", [kind.cancel], [fleet_arn(stack, kind)], own)


def own_fleet_reasons(scope: Construct, parameters: StackParameters) -> dict[str, str]:
    """Return cdk-nag's findings for these statements, with the reason."""
    reason = "Limited by the tag Stack; naming the fleet would be a cycle, as it needs the role."
    kind = KINDS[parameters.fleet]
    found = ((kind.service, f"{kind.resource}*"), ("ec2", "launch-template/*"))
    return {nag.resource(scope, *each): reason for each in found}


class FleetRole(Construct):
    """The role with which EC2 starts, tags and terminates the Spot fleet's instances."""

    role: iam.Role

    def __init__(self, scope: Construct, construct_id: str) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        requests = fleet_arn(stack, KINDS["spot"], "sfr-*")
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


class TrainingFleet(Construct):
    """Keeps one instance running until its capacity is set to zero.

    AWS calls the Spot fleet API legacy; whether a new launch template version updates it in place
    is disputed (docs/deploy.md). It has no ValidUntil: that date would differ at each synthesis,
    and a new date replaces the fleet and with it the run's machine. The Guard ends a run by hours,
    dollars and waiting instead.
    """

    fleet_id: str
    event_pattern: Mapping[str, Any]
    # What AWS counts by itself: the Spot fleet, or each of the two groups.
    members: Sequence[str]

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        launch_template: ec2.LaunchTemplate,
        subnet_ids: Sequence[str],
        security_group: ec2.SecurityGroup,
        parameter_name: str,
        guard: lambda_.IFunction,
    ) -> None:
        super().__init__(scope, construct_id)
        if parameters.mix_gpus:
            Annotations.of(self).add_info_v2(
                "mix-gpus",
                f"mix_gpus: any of {', '.join(parameters.sizes)} may start, so a replacement may "
                "have another GPU model; sample ids stay equal, weights only within a tolerance, "
                "and the receipt names each change",
            )
        self._parameters, self._template = parameters, launch_template
        # A fleet's tags do not come from CDK. RunId is among them because a new run id replaces the
        # fleet (a Spot fleet's tags and a group's name cannot be updated): one fleet is one run.
        self._tags = {
            **parameters.tags,
            "Stack": Stack.of(self).stack_name,
            "RunId": parameters.run_id,
        }
        make = {"spot": self._spot_fleet, "asg": self._groups}[parameters.fleet]
        made = make(subnet_ids, security_group)
        self.fleet_id, self.members = made[0].ref, [each.ref for each in made]
        self.event_pattern = self._pattern()
        published = ssm.StringParameter(
            self,
            "FleetId",
            parameter_name=parameter_name,
            string_value=self.fleet_id,
            description="The fleet of this stack, for its instances and its Guard",
        )
        published.node.add_dependency(*made)
        if parameters.fleet == "asg":
            published.node.add_dependency(self._start(parameter_name, guard))

    def _start(self, parameter_name: str, guard: lambda_.IFunction) -> events.Rule:
        """Wake the Guard, which requests a new group's machine, when the fleet is published."""
        change = {"name": [parameter_name], "operation": ["Create", "Update"]}
        return events.Rule(
            self,
            "Published",
            description="A new fleet: the Guard requests its machine",
            event_pattern=events.EventPattern(
                source=["aws.ssm"], detail_type=["Parameter Store Change"], detail=change
            ),
            targets=[targets.LambdaFunction(guard)],
        )

    def _pattern(self) -> Mapping[str, Any]:
        """Return EventBridge's pattern of this fleet's events."""
        kind, own = KINDS[self._parameters.fleet], list(self.members)
        if kind.service == "autoscaling":
            return {"source": [kind.source], "detail": {kind.dimension: own}}
        return {"source": [kind.source], "resources": [fleet_arn(Stack.of(self), kind, own[0])]}

    def _spot_fleet(
        self, subnet_ids: Sequence[str], security_group: ec2.SecurityGroup
    ) -> Sequence[CfnResource]:
        p = self._parameters
        fleet_role = FleetRole(Stack.of(self), "FleetRole")
        # A cancelled fleet ends its instances with this role, which must be deleted after them.
        security_group.node.add_dependency(fleet_role)
        launch = ec2.CfnSpotFleet.LaunchTemplateConfigProperty(
            launch_template_specification=ec2.CfnSpotFleet.FleetLaunchTemplateSpecificationProperty(
                launch_template_id=self._template.launch_template_id,
                # The API refuses $Latest and $Default here.
                version=self._template.latest_version_number,
            ),
            overrides=[
                ec2.CfnSpotFleet.LaunchTemplateOverridesProperty(
                    instance_type=size, subnet_id=subnet_id
                )
                for size in p.sizes
                for subnet_id in subnet_ids
            ],
        )
        specification = ec2.CfnSpotFleet.SpotFleetTagSpecificationProperty(
            resource_type=RESOURCE,
            tags=[{"key": key, "value": value} for key, value in self._tags.items()],
        )
        request = ec2.CfnSpotFleet(
            self,
            "Request",
            spot_fleet_request_config_data=ec2.CfnSpotFleet.SpotFleetRequestConfigDataProperty(
                type="maintain",
                allocation_strategy="priceCapacityOptimized",
                replace_unhealthy_instances=True,
                iam_fleet_role=fleet_role.role.role_arn,
                target_capacity=p.target_capacity,
                on_demand_target_capacity=p.on_demand_base,
                # Capacity zero is a request to stop, so excess instances are terminated at once.
                excess_capacity_termination_policy="default",
                instance_interruption_behavior="terminate",
                launch_template_configs=[launch],
                tag_specifications=[specification],
            ),
        )
        return [request]

    def _groups(self, subnet_ids: Sequence[str], _: ec2.SecurityGroup) -> Sequence[CfnResource]:
        """Create a group for each market, each of at most one machine and empty at first.

        One group of both would end machines that nobody meant to end: a changed on-demand share
        replaces them, and two machines are rebalanced between zones.
        """
        name = f"{self._tags['Stack']}-{self._parameters.run_id}"
        return [
            self._group("Spot", name, subnet_ids, NEW_GROUP, 0),
            self._group("OnDemand", name + ON_DEMAND_GROUP, subnet_ids, 1, 100),
        ]

    def _group(
        self,
        construct_id: str,
        name: str,
        subnet_ids: Sequence[str],
        max_size: int,
        on_demand_percent: int,
    ) -> autoscaling.CfnAutoScalingGroup:
        kind, group = KINDS["asg"], autoscaling.CfnAutoScalingGroup
        policy = group.MixedInstancesPolicyProperty(
            launch_template=group.LaunchTemplateProperty(
                launch_template_specification=group.LaunchTemplateSpecificationProperty(
                    launch_template_id=self._template.launch_template_id,
                    version=self._template.latest_version_number,
                ),
                overrides=[
                    group.LaunchTemplateOverridesProperty(instance_type=size)
                    for size in self._parameters.sizes
                ],
            ),
            instances_distribution=group.InstancesDistributionProperty(
                on_demand_allocation_strategy="lowest-price",
                on_demand_base_capacity=0,
                on_demand_percentage_above_base_capacity=on_demand_percent,
                spot_allocation_strategy="price-capacity-optimized",
            ),
        )
        made = group(
            self,
            construct_id,
            auto_scaling_group_name=name,
            # Without a desired capacity: CloudFormation would wait until it is reached, fail while
            # there is none, and set it again at each update. The Guard sets it.
            min_size="0",
            max_size=str(max_size * self._parameters.target_capacity),
            mixed_instances_policy=policy,
            vpc_zone_identifier=list(subnet_ids),
            health_check_type="EC2",
            # A recommendation is no notice: the machine saves at it, and trains on.
            capacity_rebalance=False,
            metrics_collection=[
                group.MetricsCollectionProperty(
                    granularity="1Minute", metrics=[kind.wanted, kind.running, *kind.kept]
                )
            ],
            tags=[
                group.TagPropertyProperty(key=key, value=value, propagate_at_launch=True)
                for key, value in self._tags.items()
            ],
        )
        nag.acknowledge(
            made,
            {
                "AS3": "The group's events go to the Guard, a log group and, if they are faults, "
                "to the topic: by EventBridge.",
                "EC26": "The rule cannot read a launch template; its volumes are encrypted.",
            },
        )
        return made
