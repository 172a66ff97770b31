"""The project's own stacks through the real CLI: deployed, changed, destroyed, adopted."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudformation import schema
from rehearsal.aws import EmbeddedAws
from tests.rehearsal.cli import NEVER, Cli

pytestmark = pytest.mark.slow
PROTECTED = ("-c", "kms=create", "-c", "access_logs=true", "-c", "alarm.email=me@example.org")


def outputs(aws: EmbeddedAws, stack: str) -> dict[str, str]:
    (found,) = aws.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
    return {each["OutputKey"]: each["OutputValue"] for each in found["Outputs"]}


def physical_ids(aws: EmbeddedAws, stack: str) -> dict[str, str]:
    found = aws.client("cloudformation").describe_stack_resources(StackName=stack)
    return {
        each["LogicalResourceId"]: each["PhysicalResourceId"] for each in found["StackResources"]
    }


def fleet_config(aws: EmbeddedAws, fleet: str) -> Any:
    found = aws.client("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=[fleet])
    return found["SpotFleetRequestConfigs"][0]["SpotFleetRequestConfig"]


def stacks_of(aws: EmbeddedAws) -> set[str]:
    return {each["StackName"] for each in aws.client("cloudformation").describe_stacks()["Stacks"]}


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as embedded:
        yield embedded


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_change_of_size_is_shown_first_and_replaces_at_most_the_fleet(
    aws: EmbeddedAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_place: bool
) -> None:
    if is_in_place:
        monkeypatch.setattr(schema, "IN_PLACE", {"AWS::EC2::SpotFleet"})
    cli = Cli(aws, tmp_path)
    cli.run("bootstrap", app=False)
    cli.run("deploy", "TrainingStack", *NEVER, *PROTECTED, app=False)
    assert aws.engine.missing_resources(["CDKToolkit", "DatasetStack", "TrainingStack"]) == []
    before = {name: physical_ids(aws, name) for name in ("DatasetStack", "TrainingStack")}
    fleet = outputs(aws, "TrainingStack")["FleetIdOutput"]
    (running,) = aws.client("ec2").describe_spot_fleet_instances(SpotFleetRequestId=fleet)[
        "ActiveInstances"
    ]

    size = ("-c", "size=g5.12xlarge")
    shown = cli.run("diff", "TrainingStack", *PROTECTED, *size, app=False)
    assert "[~] AWS::EC2::SpotFleet" in shown
    assert "[~] AWS::EC2::LaunchTemplate" in shown
    assert "g5.12xlarge" in shown
    assert "AWS::S3::Bucket" not in shown
    is_replacing = "may be replaced" in shown or "requires replacement" in shown
    assert is_replacing != is_in_place

    cli.run("deploy", "TrainingStack", *NEVER, *PROTECTED, *size, app=False)
    after = {name: physical_ids(aws, name) for name in before}
    others = {
        logical_id
        for stack, ids in before.items()
        for logical_id, physical_id in ids.items()
        if after[stack][logical_id] != physical_id
    }
    fleet = outputs(aws, "TrainingStack")["FleetIdOutput"]
    assert sorted(re.sub(r"[0-9A-F]{8}$", "", each) for each in others) == (
        [] if is_in_place else ["FleetRequest"]
    )
    template = next(name for name in after["TrainingStack"].values() if name.startswith("lt-"))
    versions = aws.client("ec2").describe_launch_template_versions(LaunchTemplateId=template)
    assert sorted(each["VersionNumber"] for each in versions["LaunchTemplateVersions"]) == [1, 2]
    (launch,) = fleet_config(aws, fleet)["LaunchTemplateConfigs"]
    assert launch["LaunchTemplateSpecification"]["Version"] == "2"
    # A running trainer is left alone, or has a successor.
    (now,) = aws.client("ec2").describe_spot_fleet_instances(SpotFleetRequestId=fleet)[
        "ActiveInstances"
    ]
    assert (now == running) == is_in_place
    again = cli.run("diff", "TrainingStack", *PROTECTED, *size, app=False)
    assert "There were no differences" in again


def test_buckets_outlive_both_stacks_and_are_used_again(aws: EmbeddedAws, tmp_path: Path) -> None:
    cli, s3 = Cli(aws, tmp_path), aws.client("s3")
    cli.run("bootstrap", app=False)
    cli.run("deploy", "TrainingStack", *NEVER, "-c", "kms=create", app=False)
    kept = outputs(aws, "DatasetStack")
    dataset, runs = kept["DatasetBucketName"], kept["RunBucketName"]
    s3.put_object(Bucket=dataset, Key="trajectory/manifest.json", Body=b"{}")
    s3.put_object(Bucket=runs, Key="runs/run-1/config.json", Body=b"kept")

    def content() -> bytes:
        body: bytes = s3.get_object(Bucket=runs, Key="runs/run-1/config.json")["Body"].read()
        return body

    cli.run("destroy", "TrainingStack", "--force", app=False)
    assert "TrainingStack" not in stacks_of(aws)
    assert content() == b"kept"
    cli.run("deploy", "TrainingStack", *NEVER, "-c", "kms=create", app=False)
    assert outputs(aws, "TrainingStack")["RunUri"] == f"s3://{runs}/runs/run-1"
    cli.run("destroy", "TrainingStack", "--force", app=False)

    refused = cli.run("destroy", "DatasetStack", "--force", app=False, fails=True)
    assert "TerminationProtection" in refused or "termination protection" in refused
    key = next(iter(aws.client("kms").list_keys()["Keys"]))["KeyArn"]
    aws.client("cloudformation").update_termination_protection(
        StackName="DatasetStack", EnableTerminationProtection=False
    )
    cli.run("destroy", "DatasetStack", "--force", app=False)
    assert "DatasetStack" not in stacks_of(aws)
    assert content() == b"kept"

    adopting = (f"dataset_bucket={dataset}", f"run_bucket={runs}", f"kms={key}")
    context = [word for pair in adopting for word in ("-c", pair)]
    cli.run("deploy", "TrainingStack", *NEVER, *context, app=False)
    assert "DatasetStack" not in stacks_of(aws)
    adopted = outputs(aws, "TrainingStack")
    assert adopted["DatasetUri"] == f"s3://{dataset}/trajectory"
    assert adopted["RunUri"] == f"s3://{runs}/runs/run-1"
    assert content() == b"kept"
