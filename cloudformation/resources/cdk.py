"""AWS::CDK::Metadata: lists the constructs that a stack uses; creates nothing, as on AWS."""

from cloudformation.resource import Provisioned, ResourceType

TYPES = {
    "AWS::CDK::Metadata": ResourceType(
        create=lambda request: Provisioned(id=request.generated_name(longest=128)),
        configure=lambda request: None,
        delete=lambda request: None,
        exists=lambda request: True,
    ),
}
