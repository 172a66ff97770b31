"""The embedded AWS: moto's services and our CloudFormation behind one local endpoint.

To the CDK CLI, boto3 and the aws CLI it looks like a real account; docs/rehearsal.md lists what it
does not do. `event_bus` runs deployed functions.
"""

from embedded_aws import service_models as service_models
from embedded_aws.server import EmbeddedAws, PortInUse

__all__ = ["EmbeddedAws", "PortInUse"]
