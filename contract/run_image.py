"""The stack that keeps a run's image: its name, and the image that a deployed stack has."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

# What the construct id of such a stack begins with.
IMAGE_STACK = "RunImage-"


def image_stack(run_id: str, parameter: str) -> str:
    """Return the construct id of the stack that keeps what a parameter names at a run's start.

    It depends on all that the template does, so a stack of that name never changes.
    """
    digest = sha256(f"{run_id} {parameter}".encode()).hexdigest()[:8]
    # A stack's name has no underscores.
    return f"{IMAGE_STACK}{run_id.replace('_', '-')}-{digest}"


def image_of(described: Mapping[str, Any]) -> str:
    """Return the image of a stack that DescribeStacks describes; empty if it has none."""
    outputs = {each["OutputKey"]: each["OutputValue"] for each in described.get("Outputs") or []}
    # Training stacks deployed before 2026-12 have it as the value of an SSM-typed parameter.
    resolved = [each.get("ResolvedValue", "") for each in described.get("Parameters") or []]
    return str(outputs.get("Image") or next((id for id in resolved if id.startswith("ami-")), ""))
