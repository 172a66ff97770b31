"""The Spot fleet, its role, who may do what with it, and what AWS calls its events and metrics.

Everything in the templates that depends on the kind of fleet; guard/fleet.py has the Guard's calls
and commands.
"""

from collections.abc import Sequence

from aws_cdk import Annotations, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from stacks import acknowledgments as nag
from stacks.parameters import StackParameters
from stacks.permissions import allow, of_stack

RESOURCE = "spot-fleet-request"
DESCRIBE = "ec2:DescribeSpotFleetRequests"
EVENT_SOURCE, ERROR_EVENT = "aws.ec2spotfleet", "EC2 Spot Fleet Error"
METRIC_NAMESPACE, METRIC_DIMENSION = "AWS/EC2Spot", "FleetRequestId"
# The errors that only a person can fix: permissions, quota, configuration. EC2's fourth,
# allLaunchSpecsTemporarilyBlacklisted, repeats while there is no capacity, which the alarm
# FleetBelowTarget reports once.
FAULTS = (
    "iamFleetRoleInvalid",
    "spotFleetRequestConfigurationInvalid",
    "spotInstanceCountLimitExceeded",
)


def fleet_arn(stack: Stack, name: str = "*") -> str:
    """Return the ARN of one fleet, or of any in the stack's account and region."""
    return stack.format_arn(service="ec2", resource=RESOURCE, resource_name=name)


def may_modify_fleet_of(stack: Stack, *, run_id: str = "") -> iam.PolicyStatement:
    """Allow setting this stack's fleet's capacity only; with `run_id`, only that run's, to zero.

    By tag: a policy that named the fleet would be a cycle, because the fleet needs the role. While
    a deploy replaces the fleet, the old run's machine reads the new fleet's id from the parameter.
    """
    # IfExists: the reference lists these keys for the call, but nothing public shows that EC2 sets
    # them. If it does not, the condition must not keep a finished run from going to zero.
    zero = {f"ec2:Attribute/{name}": "0" for name in ("TargetCapacity", "OnDemandTargetCapacity")}
    conditions = of_stack(stack)
    if run_id:
        conditions = {**of_stack(stack, RunId=run_id), "StringEqualsIfExists": zero}
    call = ["ec2:ModifySpotFleetRequest"]
    return allow("ModifyOwnFleet", call, [fleet_arn(stack)], conditions)


def may_cancel_fleet_of(stack: Stack) -> iam.PolicyStatement:
    """Allow cancelling only this stack's fleet: the Guard's fallback if modifying it is denied."""
    call = ["ec2:CancelSpotFleetRequests"]
    return allow("CancelOwnFleet", call, [fleet_arn(stack)], of_stack(stack))


def own_fleet_reasons(scope: Construct) -> dict[str, str]:
    """Return cdk-nag's finding for these two statements, with the reason."""
    reason = "Limited by the tag Stack; naming the fleet would be a cycle, as it needs the role."
    return {nag.resource(scope, "ec2", f"{RESOURCE}/*"): reason}


class FleetRole(Construct):
    """The role with which EC2 starts, tags and terminates the Spot fleet's instances."""

    role: iam.Role

    def __init__(self, scope: Construct, construct_id: str) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        requests = fleet_arn(stack, "sfr-*")
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
    """A fleet that keeps one instance running until its capacity is set to zero.

    AWS calls the Spot fleet API legacy; whether a new launch template version updates it in place
    is disputed (docs/deploy.md). It has no ValidUntil: that date would differ at each synthesis,
    and a new date replaces the fleet and with it the run's machine. The Guard ends a run by hours,
    dollars and waiting instead.
    """

    fleet_id: str
    fleet_arn: str

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        launch_template: ec2.LaunchTemplate,
        subnet_ids: Sequence[str],
        role: iam.Role,
        parameter_name: str,
    ) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        if parameters.mix_gpus:
            Annotations.of(self).add_info_v2(
                "mix-gpus",
                f"mix_gpus: any of {', '.join(parameters.sizes)} may start, so a replacement may "
                "have another GPU model; sample ids stay equal, weights only within a tolerance, "
                "and the receipt names each change",
            )
        launch = ec2.CfnSpotFleet.LaunchTemplateConfigProperty(
            launch_template_specification=ec2.CfnSpotFleet.FleetLaunchTemplateSpecificationProperty(
                launch_template_id=launch_template.launch_template_id,
                # The API refuses $Latest and $Default here.
                version=launch_template.latest_version_number,
            ),
            overrides=[
                ec2.CfnSpotFleet.LaunchTemplateOverridesProperty(
                    instance_type=size, subnet_id=subnet_id
                )
                for size in parameters.sizes
                for subnet_id in subnet_ids
            ],
        )
        # CDK's tags do not reach a Spot fleet. RunId is among them because a fleet's tags cannot be
        # updated: a new run id replaces the fleet, and one fleet is one run.
        tags = {**parameters.tags, "Stack": stack.stack_name, "RunId": parameters.run_id}
        specification = ec2.CfnSpotFleet.SpotFleetTagSpecificationProperty(
            resource_type=RESOURCE,
            tags=[{"key": key, "value": value} for key, value in tags.items()],
        )
        self._request = ec2.CfnSpotFleet(
            self,
            "Request",
            spot_fleet_request_config_data=ec2.CfnSpotFleet.SpotFleetRequestConfigDataProperty(
                type="maintain",
                allocation_strategy="priceCapacityOptimized",
                replace_unhealthy_instances=True,
                iam_fleet_role=role.role_arn,
                target_capacity=parameters.target_capacity,
                on_demand_target_capacity=parameters.on_demand_base,
                # Capacity zero is a request to stop, so excess instances are terminated at once.
                excess_capacity_termination_policy="default",
                instance_interruption_behavior="terminate",
                launch_template_configs=[launch],
                tag_specifications=[specification],
            ),
        )
        self.fleet_id = self._request.ref
        self.fleet_arn = fleet_arn(stack, self.fleet_id)
        ssm.StringParameter(
            self,
            "FleetId",
            parameter_name=parameter_name,
            string_value=self.fleet_id,
            description="The Spot fleet of this stack, for its instances and its Guard",
        )
