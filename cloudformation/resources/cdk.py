"""AWS::CDK::Metadata: says which constructs a stack uses; nothing is made, as on AWS."""

from cloudformation.resource import Made, ResourceType

TYPES = {
    "AWS::CDK::Metadata": ResourceType(
        create=lambda wish: Made(id=wish.generated_name(longest=128)),
        configure=lambda wish: None,
        delete=lambda wish: None,
        exists=lambda wish: True,
    ),
}
