"""The stacks' names in CloudFormation, and which deployed stacks are this project's.

CloudFormation updates whatever stack has a name, and deletes what the new template lacks. Names
therefore begin with a prefix that no other project uses, and whatever deploys looks first.
"""

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

# The beginning of the construct id of a stack that keeps a run's image.
IMAGE_STACK = "RunImage-"
# By construct id. DescribeStacks, ListStacks and the template have it, and all that was ever
# deployed has these words: whoever changes one makes earlier deployments look like others' stacks.
DESCRIPTIONS: Mapping[str, str] = {
    "DatasetStack": "Datasets and training runs; kept when the training stack is destroyed.",
    "NetworkStack": "The network that training stacks share.",
    "SweepStack": "A queue of many runs, which SageMaker trains a few at a time.",
    IMAGE_STACK: "The image of one run, as its first deploy found it.",
    "ReviewStack": "The role with which pull requests are compared with what is deployed.",
    "TrainingStack": "Trains one run on Spot instances that may be interrupted at any time.",
}
# cdk.json's `prefix`.
PREFIX = "SpotTraining-"
# In the name and the ARN of the sweeps' queue, if it has shares.
SHARED_QUEUE = "SharedQueue"
# A fleet of Auto Scaling groups has two: one of its name, on Spot, and this, on demand. No run's
# or stack's name has a dot; userdata/fleet_to_zero.sh spells it, too.
ON_DEMAND_GROUP = ".on-demand"
# The MaxSize of the former as templates have it; whoever requests a machine sets 1, or 0.
NEW_GROUP = 2


def training_stack(name: str = "") -> str:
    """Return the construct id of one run's stack; with `-c name=`, several can exist."""
    return f"Training-{name}" if name else "TrainingStack"


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


def description_of(construct_id: str) -> str:
    """Return what the description of our stack with this construct id is."""
    kind = IMAGE_STACK if construct_id.startswith(IMAGE_STACK) else construct_id
    return DESCRIPTIONS.get(kind, DESCRIPTIONS["TrainingStack"])


def stack_name(prefix: str, construct_id: str) -> str:
    """Return the name by which CloudFormation knows a stack; the CDK CLI selects by the id."""
    return f"{prefix}{construct_id}"


def training_id(name: str) -> str:
    """Return the words by which the CDK CLI selects a run's stack: its construct id and options.

    Without these, a command finds no stack or another team's, and ends with exit code 0.
    """
    if not (found := re.fullmatch(rf"({PREFIX}|.*)(TrainingStack|Training-(.+))", name)):
        return name
    other = "" if found[1] == PREFIX else f" -c prefix={found[1]}"
    return found[2] + (f" -c name={found[3]}" if found[3] else "") + other


def refuse_foreign(name: str, found: str | None, wanted: str | None) -> str:
    """Say in one sentence that a stack of ours would replace one of others; else return nothing.

    `found` is the deployed stack's description, `wanted` that of what a deploy would put there.
    """
    if found == wanted or wanted not in DESCRIPTIONS.values():
        return ""
    return (
        f"the stack {name} is not this project's (its description is {found or ''!r}): a deploy "
        "would delete what is in it; -c prefix=NAME- puts another prefix before the names of ours"
    )


def other_prefixes(name: str, construct_id: str, found: Mapping[str, str | None]) -> Iterator[str]:
    """Yield the prefixes under which our stack is deployed besides `name`, from descriptions."""
    for other, description in sorted(found.items()):
        is_ours = description == description_of(construct_id)
        if is_ours and other != name and other.endswith(construct_id):
            yield other.removesuffix(construct_id)
