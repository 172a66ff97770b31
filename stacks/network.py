"""NetworkStack: the outbound-only network of all training stacks of an account and region.

An account has five VPCs per region unless it requests more. With -c vpc= there is no NetworkStack.
"""

from collections.abc import Sequence
from typing import Any

from aws_cdk import Fn, RemovalPolicy, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from constructs import Construct

from contract.stack_names import DESCRIPTIONS

# Without an account, CloudFormation picks the zones; every region has at least two.
NUM_ZONES_BY_DEFAULT = 2


class Network(Construct):
    """A VPC with one public subnet in each zone, an S3 gateway endpoint and flow logs.

    Public addresses without an inbound rule instead of NAT: a NAT gateway costs $0.045 an hour plus
    $0.045 per GB, a public address $0.005 an hour; S3 traffic takes the free gateway endpoint.
    """

    vpc: ec2.Vpc

    def __init__(self, scope: Construct, construct_id: str, *, zones: Sequence[str]) -> None:
        super().__init__(scope, construct_id)
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            availability_zones=list(zones) or None,
            max_azs=None if zones else NUM_ZONES_BY_DEFAULT,
            nat_gateways=0,
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name="Public", subnet_type=ec2.SubnetType.PUBLIC, map_public_ip_on_launch=True
                )
            ],
            # CDK would use a custom resource for it; nothing here uses the default group.
            restrict_default_security_group=False,
        )
        self.vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
        self.vpc.add_flow_log(
            "FlowLog",
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(
                logs.LogGroup(
                    self,
                    "FlowLogs",
                    retention=logs.RetentionDays.ONE_MONTH,
                    removal_policy=RemovalPolicy.DESTROY,
                )
            ),
        )


class NetworkStack(Stack):
    """Always exports its VPC and subnets, so that no training stack locks another's changes."""

    vpc_id: str
    subnet_ids: list[str]

    @property
    def availability_zones(self) -> list[str]:
        """CloudFormation's choice: for a concrete account, CDK would ask AWS at synth."""
        return [Fn.select(index, Fn.get_azs()) for index in range(NUM_ZONES_BY_DEFAULT)]

    def __init__(
        self, scope: Construct, construct_id: str, *, zones: Sequence[str], **kwargs: Any
    ) -> None:
        super().__init__(scope, construct_id, description=DESCRIPTIONS["NetworkStack"], **kwargs)
        vpc = Network(self, "Network", zones=zones).vpc
        self.vpc_id = self.export_value(vpc.vpc_id)
        self.subnet_ids = [self.export_value(each.subnet_id) for each in vpc.public_subnets]
