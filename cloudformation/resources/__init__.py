"""The engine's registry: how each resource type is created, by its service's own API.

It has the types of our stacks, of CDK's bootstrap stack and of a VPC with NAT gateways, as an app
that imports the stacks has one; any other is refused by name.
"""

from cloudformation.resource import Provisioned, ResourceType
from cloudformation.resources import (
    fleets,
    identity,
    messages,
    monitoring,
    network,
    queues,
    storage,
)

REGISTRY: dict[str, ResourceType] = {
    # Lists the constructs that a stack uses; creates nothing, as on AWS.
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
