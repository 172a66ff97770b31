"""How each resource type is made, by its service's own API; the stack engine's registry.

LIMITS lists the types of which the embedded AWS keeps less than the template says.
"""

from cloudformation.resource import ResourceType
from cloudformation.resources import (
    cdk,
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

LIMITS = {
    "AWS::CDK::Metadata": "nothing is made, as on AWS",
}

REGISTRY: dict[str, ResourceType] = {
    **cdk.TYPES,
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
