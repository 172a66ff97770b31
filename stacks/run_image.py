"""RunImageStack: the image of one run's machines, found by the run's first deploy and kept.

CloudFormation reads an SSM parameter again at each update of a stack. This stack therefore never
changes, and what a training stack imports from it CloudFormation neither changes nor deletes.
"""

from typing import Any

import jsii
from aws_cdk import Aspects, CfnOutput, Fn, IAspect, Stack
from aws_cdk import aws_ssm as ssm
from constructs import Construct, IConstruct

from contract.stack_names import DESCRIPTIONS, IMAGE_STACK


@jsii.implements(IAspect)
class _Untagged:
    """Keeps the app's tags off the stack, which a deploy with others would change.

    In an app without CDK's flag explicitStackTags they are the stack's own, too.
    """

    def visit(self, node: IConstruct) -> None:
        if isinstance(node, Stack):
            for name in node.tags.tag_values():
                node.tags.remove_tag(name, 1000)


class RunImageStack(Stack):
    """Exports the id that an SSM parameter named when the stack was created."""

    image_id: str

    def __init__(
        self, scope: Construct, construct_id: str, *, newest_by: str, **kwargs: Any
    ) -> None:
        # An app that reports versions would put Python's and CDK's into the template.
        kwargs |= {"description": DESCRIPTIONS[IMAGE_STACK], "analytics_reporting": False}
        super().__init__(scope, construct_id, **kwargs)
        # CDK's rule would read the bootstrap's version, another SSM parameter; where a child has
        # its name, whatever synthesizer the app has makes none.
        Construct(self, "BootstrapVersion")
        image = ssm.CfnParameter(
            self, "RunImage", type="String", value=f"{{{{resolve:ssm:{newest_by}}}}}"
        )
        image.add_property_deletion_override("Tags")
        Aspects.of(self).add(_Untagged(), priority=900)  # after those of the app
        CfnOutput(self, "Image", value=image.attr_value, export_name=self.stack_name)
        self.image_id = Fn.import_value(self.stack_name)
