"""ReviewStack: made when asked for; one repository's pull requests read the app's templates."""

from collections.abc import Callable
from typing import Any

import pytest
from aws_cdk import App

from stacks.parameters import StackParameters
from stacks.review_stack import ReviewStack, subjects
from tests.stack_names import DATASET, NETWORK, TRAINING, named

PROVIDER = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
GIVEN = {"review.oidc_provider": PROVIDER, "review.repository": "somebody@583231/training@1296269"}


@pytest.fixture(scope="module")
def resources(synthesize: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = synthesize(**GIVEN)["ReviewStack"]["Resources"]
    return found


def test_it_is_left_out_unless_asked_for(templates: dict[str, Any]) -> None:
    assert "ReviewStack" not in templates


def test_only_pull_requests_of_the_repository_take_the_role(resources: dict[str, Any]) -> None:
    (role,) = [each for each in resources.values() if each["Type"] == "AWS::IAM::Role"]
    (statement,) = role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert statement == {
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Effect": "Allow",
        "Principal": {"Federated": PROVIDER},
        "Condition": {
            "StringEquals": {
                "token.actions.githubusercontent.com:aud": "sts.amazonaws.com",
                "token.actions.githubusercontent.com:sub": [
                    "repo:somebody@583231/training@1296269:pull_request",
                    "repo:somebody/training:pull_request",
                ],
            }
        },
    }
    assert role["Properties"]["MaxSessionDuration"] == 3600
    assert "ManagedPolicyArns" not in role["Properties"]


def test_a_repository_without_ids_is_trusted_by_its_names_alone() -> None:
    assert subjects("somebody/training") == ["repo:somebody/training:pull_request"]


def test_the_role_reads_the_templates_and_nothing_else(resources: dict[str, Any]) -> None:
    assert sorted(each["Type"] for each in resources.values()) == [
        "AWS::IAM::Policy",
        "AWS::IAM::Role",
    ]
    (policy,) = [each for each in resources.values() if each["Type"] == "AWS::IAM::Policy"]
    (statement,) = policy["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Action"] == ["cloudformation:DescribeStacks", "cloudformation:GetTemplate"]
    tails = [each["Fn::Join"][1][-1] for each in statement["Resource"]]
    names = (DATASET, NETWORK, named("ReviewStack"), named("RunImage-*"), TRAINING)
    assert tails == [f":stack/{name}/*" for name in names]


def test_adopted_buckets_leave_one_template_to_read(synthesize: Callable[..., Any]) -> None:
    templates = synthesize(**GIVEN, dataset_bucket="my-data", run_bucket="my-runs")
    assert f"stack/{TRAINING}/" in str(templates["ReviewStack"])
    assert f"stack/{DATASET}/" not in str(templates["ReviewStack"])


def test_an_app_of_ones_own_names_its_stacks_and_the_images_are_added() -> None:
    app = App()
    parameters = StackParameters.for_size("g5.xlarge", **GIVEN)
    ReviewStack(app, "Review", parameters=parameters, stack_names=["Vision"])
    found = str(app.synth().get_stack_by_name("Review").template)
    for name in ("Vision", "Review", named("RunImage-*")):
        assert f":stack/{name}/*" in found


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"review.oidc_provider": ""}, "review.oidc_provider is missing; set both"),
        ({"review.repository": ""}, "review.repository is missing; set both"),
        ({"review.repository": "somebody/*"}, "use OWNER/NAME"),
        ({"review.repository": "somebody@*/training@*"}, "use OWNER/NAME"),
        ({"review.repository": "somebody@1/training"}, "or OWNER@ID/NAME@ID, which a repository"),
        ({"review.oidc_provider": PROVIDER.replace("token", "token.evil")}, "oidc-provider/token"),
    ],
    ids=["provider", "repository", "wildcard", "any id", "one id", "another issuer"],
)
def test_fails_for_what_would_trust_too_much(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StackParameters.for_size("g5.xlarge", **{**GIVEN, **change})
