"""The engine's registry: how each resource type is created, by its service's own API."""

from cloudformation.resource import Provisioned, ResourceType
from cloudformation.resources import (
    cloudwatch,
    ec2_instances,
    ec2_network,
    ecr,
    events,
    iam,
    kms,
    lambda_functions,
    logs,
    s3,
    security_groups,
    sns,
    ssm,
)

REGISTRY: dict[str, ResourceType] = {
    # Lists the constructs that a stack uses; creates nothing, as on AWS.
    "AWS::CDK::Metadata": ResourceType(
        create=lambda request: Provisioned(id=request.generated_name(longest=128)),
        configure=lambda request: None,
        delete=lambda request: None,
        exists=lambda request: True,
    ),
    **cloudwatch.TYPES,
    **ec2_instances.TYPES,
    **ec2_network.TYPES,
    **ecr.TYPES,
    **events.TYPES,
    **iam.TYPES,
    **kms.TYPES,
    **lambda_functions.TYPES,
    **logs.TYPES,
    **s3.TYPES,
    **security_groups.TYPES,
    **sns.TYPES,
    **ssm.TYPES,
}
