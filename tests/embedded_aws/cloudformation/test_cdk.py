"""The real CDK CLI against the stack engine: deploy, diff, change, fail, destroy."""

from pathlib import Path
from typing import Any

import pytest

from embedded_aws import EmbeddedAws
from tests.embedded_aws.cdk_cli import NEVER, Cli, needs_cdk
from tests.embedded_aws.cloudformation.resource_cases import TOPIC, group, parameter

pytestmark = needs_cdk

PRODUCER = {
    "Resources": {"Topic": TOPIC},
    "Outputs": {"Topic": {"Value": {"Ref": "Topic"}, "Export": {"Name": "topic"}}},
}
AMI = (
    "/aws/service/deeplearning/ami/x86_64/"
    "oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)


def consumer(**resources: Any) -> dict[str, Any]:
    kind = "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>"
    return {
        "Parameters": {"Ami": {"Type": kind, "Default": AMI}},
        "Resources": {"Imported": parameter({"Fn::ImportValue": "topic"}), **resources},
        "Outputs": {"Image": {"Value": {"Ref": "Ami"}}},
    }


def test_two_stacks_from_first_deploy_to_destroy(aws: EmbeddedAws, tmp_path: Path) -> None:
    cli, cloudformation = Cli(aws, tmp_path), aws.client("cloudformation")

    def deploy(**resources: Any) -> str:
        cli.write({"Producer": PRODUCER, "Consumer": consumer(**resources)}, Consumer="Producer")
        fails = "Bad" in resources
        return cli.run("deploy", "Consumer", *NEVER, fails=fails)

    def status() -> str:
        return str(cloudformation.describe_stacks(StackName="Consumer")["Stacks"][0]["StackStatus"])

    out = deploy(Log=group(LogGroupName="first", RetentionInDays=7))
    assert "Including dependency stacks: Producer" in out
    assert "Consumer.Image = ami-" in out
    assert aws.engine.missing_resources(["Producer", "Consumer"]) == []

    # The SSM-typed parameter makes the CLI ask for a change set, which turns out empty.
    assert "Consumer (no changes)" in deploy(Log=group(LogGroupName="first", RetentionInDays=7))

    assert "UPDATE_COMPLETE" in deploy(Log=group(LogGroupName="first", RetentionInDays=30))
    cli.write({"Consumer": consumer(Log=group(LogGroupName="second"))})
    assert "LogGroupName (requires replacement)" in cli.run("diff", "Consumer")
    deploy(Log=group(LogGroupName="second"))
    names = [item["logGroupName"] for item in aws.client("logs").describe_log_groups()["logGroups"]]
    assert names == ["second"]

    out = deploy(
        Log=group(LogGroupName="third"),
        Bad={**parameter(Name="/aws/service/mine"), "DependsOn": "Log"},
    )
    assert "UPDATE_ROLLBACK_COMPLET" in out  # the CLI cuts it
    assert "No access to reserved parameter name: /aws/service/mine" in out
    assert status() == "UPDATE_ROLLBACK_COMPLETE"
    assert aws.engine.missing_resources(["Consumer"]) == []

    cli.run("destroy", "Consumer", "--force")
    assert [item["StackName"] for item in cloudformation.describe_stacks()["Stacks"]] == [
        "Producer"
    ]


@pytest.mark.slow  # in each run of the tests, without the CLI: test_stacks.py
def test_fails_and_can_be_deployed_again_after_a_broken_first_deploy(
    aws: EmbeddedAws, tmp_path: Path
) -> None:
    cli = Cli(aws, tmp_path)
    cli.write({"Again": {"Resources": {"A": parameter(Name="/aws/service/mine")}}})
    assert "ROLLBACK_COMPLETE" in cli.run("deploy", "Again", *NEVER, fails=True)
    cli.write({"Again": {"Resources": {"A": parameter("x")}}})
    assert "CREATE_COMPLETE" in cli.run("deploy", "Again", *NEVER)
    aws.client("cloudformation").delete_stack(StackName="Again")
