"""The embedded AWS: moto's services and our own CloudFormation behind one local endpoint."""

from rehearsal.aws.server import EmbeddedAws, PortInUse

__all__ = ["EmbeddedAws", "PortInUse"]
