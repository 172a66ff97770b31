"""The stacks' names in CloudFormation, with the prefix of cdk.json."""

from contract.stack_names import stack_name
from rehearsal.demo.deployment import PREFIX


def named(construct_id: str) -> str:
    return stack_name(PREFIX, construct_id)


DATASET, NETWORK, TRAINING = map(named, ("DatasetStack", "NetworkStack", "TrainingStack"))
