"""An outbound-only network: public subnets, no NAT gateway, no inbound rule."""

from collections.abc import Sequence

from aws_cdk import RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from constructs import Construct, DependencyGroup, IDependable

# Without an account, CloudFormation picks the zones; every region has at least two.
NUM_ZONES_BY_DEFAULT = 2


class Network(Construct):
    """A VPC with one public subnet in each zone, an S3 gateway endpoint and flow logs.

    Public addresses without an inbound rule instead of NAT: a NAT gateway costs $0.045 an hour plus
    $0.045 per GB, a public address $0.005 an hour; S3 traffic takes the free gateway endpoint.
    """

    vpc: ec2.Vpc
    security_group: ec2.SecurityGroup
    route: IDependable

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
            # CDK would do it by a custom resource; nothing here uses the default group.
            restrict_default_security_group=False,
        )
        endpoint = self.vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
        # vpc.internet_connectivity_established covers only the gateway (aws-cdk-lib 2.275); each
        # subnet construct contains its route table, the association and the default route.
        self.route = DependencyGroup(*self.vpc.public_subnets, endpoint)
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
        self.security_group = ec2.SecurityGroup(
            self,
            "InstanceSecurityGroup",
            vpc=self.vpc,
            description="Training instances: outbound only, reached through Session Manager",
            allow_all_outbound=True,
        )
