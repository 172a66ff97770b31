"""The embedded AWS: moto's services and our CloudFormation behind one local endpoint.

To the CDK CLI, boto3 and the aws CLI it looks like a real account; docs/rehearsal.md lists what it
does not do.
"""

from typing import TYPE_CHECKING

from contract import door
from embedded_aws import service_models as service_models

if TYPE_CHECKING:
    from embedded_aws.capacity import Course
    from embedded_aws.cloudformation.schema import (
        create_only_values,
        custom_name,
        is_disputed,
        replacing_paths,
    )
    from embedded_aws.cloudformation.template import load_template, references
    from embedded_aws.event_bus import EventBus
    from embedded_aws.faults import Fault, FaultInjector
    from embedded_aws.front import Front
    from embedded_aws.server import EmbeddedAws
    from embedded_aws.training_jobs import TrainingJob
else:
    __getattr__ = door.of(__name__)

# fmt: off
__all__ = [
    "Course", "EmbeddedAws", "EventBus", "Fault", "FaultInjector", "Front", "TrainingJob",
    "create_only_values", "custom_name", "is_disputed", "load_template", "references",
    "replacing_paths",
]
