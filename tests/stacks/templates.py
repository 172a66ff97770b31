"""Readers of synthesized templates for the tests of stacks/."""

from typing import Any

from contract.run_env import Name
from stacks import user_data
from stacks.parameters import StackParameters


def every(template: Any, type_name: str) -> list[Any]:
    """The properties of all resources of a type."""
    found = template.get("Resources", template).values()
    return [each.get("Properties", {}) for each in found if each["Type"] == type_name]


def only(template: Any, type_name: str) -> Any:
    """The properties of the only resource of a type."""
    (found,) = every(template, type_name)
    return found


def sample_run_env(parameters: StackParameters, **changes: str) -> dict[Name, str]:
    """The run.env of these parameters, with names that CloudFormation could give."""
    given = {
        "prediction": "",
        "dataset_uri": f"s3://datasets/{parameters.dataset}",
        "run_uri": f"s3://runs/runs/{parameters.run_id}",
        "stack_name": "TrainingStack",
        "region": "us-east-1",
        "fleet_parameter": "/TrainingStack/fleet-id",
    }
    return user_data.run_env(parameters, **{**given, **changes})
