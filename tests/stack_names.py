"""The stacks' names in CloudFormation, with the prefix of cdk.json."""

import json
from pathlib import Path

from contract.stack_names import stack_name

CDK_JSON = Path(__file__).parent.parent / "cdk.json"
PREFIX: str = json.loads(CDK_JSON.read_text())["context"]["prefix"]


def named(construct_id: str) -> str:
    return stack_name(PREFIX, construct_id)


DATASET, NETWORK, TRAINING = map(named, ("DatasetStack", "NetworkStack", "TrainingStack"))
