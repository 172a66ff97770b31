"""ReviewStack: the role that lets a pull request's review read the deployed templates.

    npx cdk deploy ReviewStack -c review.repository=OWNER@ID/NAME@ID -c review.oidc_provider=ARN

It uses the account's existing GitHub OIDC provider: an account can have only one.
"""

import re
from collections.abc import Sequence
from typing import Any

from aws_cdk import CfnOutput, Duration, Stack
from aws_cdk import aws_iam as iam
from constructs import Construct

from contract.stack_names import DESCRIPTIONS, IMAGE_STACK
from stacks import acknowledgments as nag
from stacks.parameters import StackParameters
from stacks.permissions import allow

ISSUER = "token.actions.githubusercontent.com"


def subjects(repository: str) -> list[str]:
    """Return the token subjects of a repository's pull requests, with ids and without.

    Repositories made, renamed or moved since 15 July 2026 have ids in their subject, older ones
    only after opting in (https://github.blog/changelog/2026-04-23-immutable-subject-claims-for-
    github-actions-oidc-tokens), so whoever takes over a name does not get the one without ids.
    Pull requests only: no branch, tag or environment; those from forks get no token.
    """
    names = re.sub(r"@\d+", "", repository)
    return [f"repo:{each}:pull_request" for each in dict.fromkeys((repository, names))]


class ReviewStack(Stack):
    """One role with which pull requests of one repository read the templates of these stacks."""

    role: iam.Role

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        stack_names: Sequence[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, construct_id, description=DESCRIPTIONS["ReviewStack"], **kwargs)
        provider = iam.OpenIdConnectProvider.from_open_id_connect_provider_arn(
            self, "GitHub", parameters.review.oidc_provider
        )
        self.role = iam.Role(
            self,
            "Role",
            description=f"Pull requests of {parameters.review.repository}: read templates",
            max_session_duration=Duration.hours(1),
            assumed_by=iam.OpenIdConnectPrincipal(
                provider,
                conditions={
                    "StringEquals": {
                        f"{ISSUER}:aud": "sts.amazonaws.com",
                        f"{ISSUER}:sub": subjects(parameters.review.repository),
                    }
                },
            ),
        )
        # The review reads each stack of its app: this one, too, and those of any run's image.
        images = parameters.name_of(f"{IMAGE_STACK}*")
        stack_names = [*stack_names, self.stack_name, images]
        # CloudFormation appends an id to the name.
        arns = [
            self.format_arn(service="cloudformation", resource="stack", resource_name=f"{name}/*")
            for name in stack_names
        ]
        read = ["cloudformation:GetTemplate", "cloudformation:DescribeStacks"]
        self.role.add_to_policy(allow("ReadTemplates", read, arns))
        reason = "A stack's ARN ends with an id that CloudFormation assigns."
        found = [nag.resource(self, "cloudformation", f"stack/{name}/*") for name in stack_names]
        nag.acknowledge(self, dict.fromkeys(found, reason))
        CfnOutput(self, "ReviewRoleArn", value=self.role.role_arn)
