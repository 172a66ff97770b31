"""The CDK app: context -> parameters -> stacks. Run it through the CLI: npx cdk synth"""

import os
import sys
from pathlib import Path
from typing import Any

# jsii starts the first `node` on PATH; the virtual environment has its own, activated or not.
_NODE = Path(sys.executable).with_name("node")
if _NODE.exists():
    os.environ.setdefault("JSII_NODE", str(_NODE))

from aws_cdk import App, CfnOutput, Environment, Stack, Tags, Validations  # noqa: E402
from cdk_nag import AwsSolutionsChecks  # noqa: E402

from sizing import PRICE_REGION  # noqa: E402
from stacks import (  # noqa: E402
    DatasetStack,
    NetworkStack,
    ReviewStack,
    StackParameters,
    SweepStack,
    TrainingStack,
)

# Left there by `make setup`; a review's base has the same environment, hence the same bundle.
WHEELS = Path(sys.prefix) / "wheels"


def build(
    app: App,
    wheels: Path | None = None,
    *,
    env: Environment | None = None,
    region: str | None = None,
) -> TrainingStack:
    """Add the stacks that `app`'s context requests; a user's mistake is a ValueError.

    Without `env`, they are for whichever account and region the CLI deploys to, at the prices of
    `region`.
    """
    parameters = StackParameters.from_context(
        app.node.get_all_context(), region=(env and env.region) or region or PRICE_REGION
    )

    def named(construct_id: str) -> dict[str, Any]:
        name = parameters.name_of(construct_id)
        return {"construct_id": construct_id, "stack_name": name, "env": env}

    data = {
        "dataset_bucket_name": parameters.dataset_bucket,
        "run_bucket_name": parameters.run_bucket,
        "key_arn": parameters.kms,
    }
    shared: list[Stack] = []
    # CloudFormation refuses empty stacks: with both buckets adopted, DatasetStack is left out.
    if not (parameters.dataset_bucket and parameters.run_bucket):
        dataset_stack = DatasetStack(app, **named("DatasetStack"), parameters=parameters)
        data = {name: getattr(dataset_stack, name) for name in data}
        shared.append(dataset_stack)
    queues: list[Stack] = []
    if parameters.sweep.instances:
        queues = [SweepStack(app, **named("SweepStack"), parameters=parameters, **data)]
        for stack in shared:
            queues[0].add_stack_dependency(stack)
    vpc_id, subnet_ids = parameters.vpc, parameters.subnets
    if not vpc_id:
        network = NetworkStack(app, **named("NetworkStack"), zones=parameters.zones)
        vpc_id, subnet_ids = network.vpc_id, tuple(network.subnet_ids)
        shared.append(network)
    training_stack = TrainingStack(
        app,
        **named(parameters.training),
        parameters=parameters,
        **data,
        vpc_id=vpc_id,
        subnet_ids=subnet_ids,
        wheels=wheels,
    )
    # Another deploy with fewer options would begin another run.
    deploy = parameters.training + StackParameters.options(app.node.get_all_context())
    CfnOutput(training_stack, "DeployCommand", value=f"npx cdk deploy {deploy}")
    for stack in shared:
        training_stack.add_stack_dependency(stack)
    if parameters.review.repository:
        ReviewStack(
            app,
            **named("ReviewStack"),
            parameters=parameters,
            stack_names=[each.stack_name for each in (*shared, *queues, training_stack)],
        )
    for key, value in parameters.tags.items():
        Tags.of(app).add(key, value)
    return training_stack


def main() -> int:
    """Synthesize; on a user's mistake, print one sentence and return exit code 2."""
    # Its findings are warnings at half the time of a synth: `make check` has them.
    is_validated = os.environ.get("CDK_VALIDATION") == "true"
    app = App(stack_traces=False, builtin_cloud_formation_validation=is_validated)
    try:
        build(app, WHEELS, region=os.environ.get("CDK_DEFAULT_REGION"))
    except ValueError as mistake:
        print(f"app.py: {mistake}", file=sys.stderr)
        return 2
    Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
