"""The real CDK CLI against the stack engine: deploy, diff, change, fail, destroy."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rehearsal.aws import EmbeddedAws

REPOSITORY = Path(__file__).parents[3]
NEVER = ("--require-approval", "never")


class Cli:
    """Runs `npx cdk` with the variables that the embedded AWS prints."""

    def __init__(self, aws: EmbeddedAws, folder: Path) -> None:
        self.aws = aws
        self.folder = folder

    def run(self, *arguments: str, app: bool = True, fails: bool = False) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        where = ("--app", str(self.folder)) if app else ("--output", str(self.folder))
        done = subprocess.run(
            ["npx", "--no-install", "cdk", *arguments, *where, "--ci", "--no-color"],
            cwd=REPOSITORY,
            env={**kept, **self.aws.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout
        return done.stdout

    def write(self, stacks: Mapping[str, Any], **needs: str) -> None:
        """A cloud assembly by hand: what synth would write, without its ten seconds."""
        artifacts = {}
        for name, template in stacks.items():
            (self.folder / f"{name}.json").write_text(json.dumps(template))
            artifacts[name] = {
                "type": "aws:cloudformation:stack",
                "environment": "aws://unknown-account/unknown-region",
                "properties": {"templateFile": f"{name}.json"},
                "dependencies": [needs[name]] if name in needs else [],
            }
        manifest = {"version": "36.0.0", "artifacts": artifacts}
        (self.folder / "manifest.json").write_text(json.dumps(manifest))


def group(**properties: Any) -> dict[str, Any]:
    return {"Type": "AWS::Logs::LogGroup", "Properties": properties}


def value(of: Any) -> dict[str, Any]:
    return {"Type": "AWS::SSM::Parameter", "Properties": {"Type": "String", "Value": of}}


PRODUCER = {
    "Resources": {"Topic": {"Type": "AWS::SNS::Topic"}},
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
        "Resources": {"Imported": value({"Fn::ImportValue": "topic"}), **resources},
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
    assert aws.missing_resources(["Producer", "Consumer"]) == []

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
        Bad={"Type": "AWS::SSM::Parameter", "DependsOn": "Log",
             "Properties": {"Type": "String", "Value": "x", "Name": "/aws/service/mine"}},
    )  # fmt: skip
    assert "UPDATE_ROLLBACK_COMPLET" in out  # the CLI cuts it
    assert "No access to reserved parameter name: /aws/service/mine" in out
    assert status() == "UPDATE_ROLLBACK_COMPLETE"
    assert aws.missing_resources(["Consumer"]) == []

    out = deploy(Bad=group(RetentionInDays=8))
    assert "8 is not a valid enum value" in out
    out = deploy(Bad={"Type": "AWS::EKS::Cluster"})
    assert "Unrecognized resource types: [AWS::EKS::Cluster]" in out

    cli.run("destroy", "Consumer", "--force")
    assert [item["StackName"] for item in cloudformation.describe_stacks()["Stacks"]] == [
        "Producer"
    ]


def test_fails_and_can_be_deployed_again_after_a_broken_first_deploy(
    aws: EmbeddedAws, tmp_path: Path
) -> None:
    cli = Cli(aws, tmp_path)
    bad = {"Type": "String", "Value": "x", "Name": "/aws/service/mine"}
    cli.write({"Again": {"Resources": {"A": {"Type": "AWS::SSM::Parameter", "Properties": bad}}}})
    assert "ROLLBACK_COMPLETE" in cli.run("deploy", "Again", *NEVER, fails=True)
    cli.write({"Again": {"Resources": {"A": value("x")}}})
    assert "CREATE_COMPLETE" in cli.run("deploy", "Again", *NEVER)
    cli.run("destroy", "Again", "--force")


@pytest.mark.slow
def test_the_project_is_bootstrapped_deployed_changed_and_destroyed(
    aws: EmbeddedAws, tmp_path: Path
) -> None:
    cli, ec2 = Cli(aws, tmp_path), aws.client("ec2")
    cli.run("bootstrap", app=False)
    cli.run("bootstrap", app=False)
    cli.run("deploy", "TrainingStack", *NEVER, app=False)
    assert aws.missing_resources(["CDKToolkit", "DatasetStack", "TrainingStack"]) == []
    ssm = aws.client("ssm").get_parameter(Name="/TrainingStack/fleet-id")
    fleet = ssm["Parameter"]["Value"]
    (first,) = ec2.describe_spot_fleet_instances(SpotFleetRequestId=fleet)["ActiveInstances"]
    differing = ("diff", "TrainingStack", "-c", "size=g5.xlarge")
    assert "g5.xlarge" in cli.run(*differing, app=False)
    cli.run("deploy", "TrainingStack", "-c", "size=g5.xlarge", *NEVER, app=False)
    assert "There were no differences" in cli.run(*differing, app=False)
    (same,) = ec2.describe_spot_fleet_instances(SpotFleetRequestId=fleet)["ActiveInstances"]
    assert same == first
    ec2.terminate_instances(InstanceIds=[first["InstanceId"]])
    ec2.modify_spot_fleet_request(SpotFleetRequestId=fleet, TargetCapacity=1)
    (second,) = ec2.describe_spot_fleet_instances(SpotFleetRequestId=fleet)["ActiveInstances"]
    assert second["InstanceType"] == "g5.xlarge"
    cli.run("destroy", "TrainingStack", "--force", app=False)
    running = ec2.describe_instances(
        Filters=[{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    )
    assert running["Reservations"] == []
    assert aws.missing_resources(["DatasetStack"]) == []
