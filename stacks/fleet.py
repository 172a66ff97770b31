"""The Spot fleet, and everything that depends on which kind of fleet it is."""

from collections.abc import Sequence

from aws_cdk import Annotations, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from stacks.parameters import StackParameters


class TrainingFleet(Construct):
    """A fleet that keeps one instance running until its capacity is set to zero.

    AWS calls the Spot fleet API legacy; a new launch template version updates it in place and
    leaves a running instance alone, which an EC2 fleet would not. It has no ValidUntil: that is a
    date, so it would be another at each synthesis, and another date replaces the fleet and with it
    the machine of the run. The Guard ends a run by hours, dollars and waiting instead.
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
            resource_type="spot-fleet-request",
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
        self.fleet_arn = stack.format_arn(
            service="ec2", resource="spot-fleet-request", resource_name=self.fleet_id
        )
        ssm.StringParameter(
            self,
            "FleetId",
            parameter_name=parameter_name,
            string_value=self.fleet_id,
            description="The Spot fleet of this stack, for its instances and its Guard",
        )
