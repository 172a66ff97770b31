"""RunImageStack: the image of one run's machines, found by the run's first deploy and kept.

CloudFormation reads an SSM parameter again at each update of a stack. This stack therefore never
changes, and what a training stack imports from it CloudFormation neither changes nor deletes.
"""

from typing import Any

from aws_cdk import CfnOutput, DefaultStackSynthesizer, Fn, Stack
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from contract.stack_names import DESCRIPTIONS, IMAGE_STACK


class RunImageStack(Stack):
    """Exports the id that an SSM parameter named when the stack was created."""

    image_id: str

    def __init__(
        self, scope: Construct, construct_id: str, *, newest_by: str, **kwargs: Any
    ) -> None:
        super().__init__(
            scope,
            construct_id,
            description=DESCRIPTIONS[IMAGE_STACK],
            # Its rule would read the bootstrap's version, another SSM parameter.
            synthesizer=DefaultStackSynthesizer(generate_bootstrap_version_rule=False),
            **kwargs,
        )
        image = ssm.CfnParameter(
            self, "RunImage", type="String", value=f"{{{{resolve:ssm:{newest_by}}}}}"
        )
        # A deploy with other tags would change the stack.
        image.add_property_deletion_override("Tags")
        CfnOutput(self, "Image", value=image.attr_value, export_name=self.stack_name)
        self.image_id = Fn.import_value(self.stack_name)
