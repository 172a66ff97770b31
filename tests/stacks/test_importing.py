"""TrainingStack in an app of somebody else's: several regions, tags, and what synth refuses."""

from typing import Any, cast

import pytest
from aws_cdk import App, Environment, Stack, Tags

from stacks import TrainingStack
from stacks.parameters import StackParameters
from tests.stack_names import named
from tests.stacks.templates import only


def vision(app: App, name: str, region: str = "", **more: Any) -> TrainingStack:
    given: dict[str, Any] = {"subnet_ids": ["subnet-1"], **more}
    return TrainingStack(
        app, name, parameters=StackParameters.for_size("g5.xlarge"), dataset_bucket_name="data-b",
        run_bucket_name="run-b", key_arn="", vpc_id="vpc-1",
        env=Environment(account="111122223333", region=region) if region else None, **given,
    )  # fmt: skip


def test_each_region_of_an_app_keeps_the_images_of_its_own_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Enough(Exception):
        pass

    def stop(*_: object) -> None:
        raise Enough

    monkeypatch.setattr(TrainingStack, "_machine", stop)
    app = App()
    for name, region in {"A": "us-east-1", "B": "eu-west-1", "C": "eu-west-1"}.items():
        with pytest.raises(Enough):
            vision(app, name, region)
        stack = cast(Stack, app.node.find_child(name))
        (keeper,) = stack.dependencies
        assert keeper.environment == stack.environment == f"aws://111122223333/{region}"
        assert keeper.stack_name == named("RunImage-run-1-02012aed")


def test_an_app_s_tags_do_not_replace_those_that_the_guard_and_permissions_rely_on() -> None:
    app = App(builtin_cloud_formation_validation=False)
    stack = vision(app, "Vision", wheels="no-such-folder")
    for scope in (app, stack):
        for key in ("Stack", "RunId"):
            Tags.of(scope).add(key, "theirs", priority=500)
    template = app.synth().get_stack_by_name("Vision").template
    data = only(template, "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    for each in data["TagSpecifications"]:
        tags = {tag["Key"]: tag["Value"] for tag in each["Tags"]}
        assert (tags["Stack"], tags["RunId"]) == ("Vision", "run-1")


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("A", {"subnet_ids": []}, r"subnet_ids is \[\]; list one or more"),
        ("A", {"subnet_ids": "subnet-1"}, "subnet_ids is 'subnet-1'; list one or more"),
        ("AwsVision", {}, "AwsVision begins with aws or ssm, which Systems Manager reserves"),
    ],
)
def test_fails_for_what_a_deploy_would_refuse_half_way(
    name: str, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        vision(App(), name, **more)
