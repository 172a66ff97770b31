"""The engine's registry: the resource types that it can create, through their services' own APIs.

It covers our stacks, CDK's bootstrap stack and a VPC with NAT gateways (which an app that imports
the stacks may have); any other type is refused by name.
"""

from embedded_aws.cloudformation.resource import Provisioned, ResourceType
from embedded_aws.cloudformation.resources import (
    fleets,
    identity,
    messages,
    monitoring,
    network,
    queues,
    storage,
)

REGISTRY: dict[str, ResourceType] = {
    # Metadata lists the constructs that a stack uses and creates nothing, as on AWS.
    "AWS::CDK::Metadata": ResourceType(
        create=lambda request: Provisioned(id=request.generated_name(longest=128)),
        configure=lambda request: None,
        delete=lambda request: None,
        exists=lambda request: True,
    ),
    **fleets.TYPES,
    **identity.TYPES,
    **messages.TYPES,
    **monitoring.TYPES,
    **network.TYPES,
    **queues.TYPES,
    **storage.TYPES,
}
