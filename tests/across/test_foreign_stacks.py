"""Stacks of other projects in the same account: none of our commands touches them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embedded_aws import EmbeddedAws
from tests.embedded_aws.cdk_cli import NEVER, REPOSITORY, Cli
from tests.stack_names import named

pytestmark = pytest.mark.slow
VPC = {"VpcId": {"Ref": "Vpc"}}
NETWORK = {
    "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.7.0.0/16"}},
    "Subnet": {"Type": "AWS::EC2::Subnet", "Properties": {**VPC, "CidrBlock": "10.7.0.0/24"}},
    "Routes": {"Type": "AWS::EC2::RouteTable", "Properties": VPC},
    "Setting": {
        "Type": "AWS::SSM::Parameter",
        "Properties": {"Type": "String", "Value": "theirs"},
    },
}
TRAINING = {"Courses": {"Type": "AWS::S3::Bucket"}, "Mail": {"Type": "AWS::SNS::Topic"}}


class Account:
    """An account in which others have stacks, and our commands in it."""

    def __init__(self, aws: EmbeddedAws, cli: Cli) -> None:
        self.aws, self.cli = aws, cli
        self.stacks = aws.client("cloudformation")
        self.theirs: dict[str, Any] = {}

    def add(self, name: str, resources: dict[str, Any]) -> None:
        self.stacks.create_stack(StackName=name, TemplateBody=json.dumps({"Resources": resources}))
        self.stacks.get_waiter("stack_create_complete").wait(
            StackName=name, WaiterConfig={"Delay": 1}
        )
        self.theirs[name] = self._state(name)

    def _state(self, name: str) -> Any:
        (stack,) = self.stacks.describe_stacks(StackName=name)["Stacks"]
        found = self.stacks.describe_stack_resources(StackName=name)["StackResources"]
        ids = {each["LogicalResourceId"]: each["PhysicalResourceId"] for each in found}
        return stack["StackId"], stack["StackStatus"], ids

    def is_untouched(self) -> bool:
        """Whether each stack of others is as it was, each of its resources in its service."""
        missing = self.aws.engine.missing_resources(list(self.theirs))
        return not missing and all(self._state(name) == was for name, was in self.theirs.items())

    def run(self, *command: str) -> tuple[int, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**kept, **self.aws.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def make(self, target: str, *options: str) -> tuple[int, str]:
        # The environment and the wheels are as they are.
        made = ("-o", ".venv/.ready", "-o", ".venv/wheels")
        return self.run("make", *made, target, f"ARGS={' '.join(options)}")

    def python(self, *arguments: str) -> tuple[int, str]:
        return self.run(sys.executable, "-m", *arguments)


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    with EmbeddedAws() as aws:
        cli = Cli(aws, tmp_path_factory.mktemp("cdk.out"))
        cli.run("bootstrap", f"aws://{aws.account}/{aws.region}", "--app", "", app=False)
        found = Account(aws, cli)
        found.add("NetworkStack", NETWORK)
        found.add("TrainingStack", TRAINING)
        found.add("VisionTeam-NetworkStack", NETWORK)
        found.add("SoundTeam-TrainingStack", TRAINING)
        yield found


@pytest.mark.parametrize("command", [("TrainingStack",), ("Training*",), ("--all",)])
def test_a_deploy_leaves_the_stacks_of_others_alone(
    account: Account, command: tuple[str, ...]
) -> None:
    account.cli.run("deploy", *command, *NEVER, app=False)
    assert account.is_untouched()
    ours = [named(each) for each in ("DatasetStack", "NetworkStack", "TrainingStack")]
    assert account.aws.engine.missing_resources(ours) == []


def test_two_teams_with_prefixes_of_their_own_train_in_one_account(account: Account) -> None:
    account.cli.run("deploy", "TrainingStack", *NEVER, "-c", "prefix=TextTeam-", app=False)
    kinds = ("DatasetStack", "NetworkStack", "TrainingStack")
    both = [f"{prefix}{kind}" for prefix in (named(""), "TextTeam-") for kind in kinds]
    assert account.aws.engine.missing_resources(both) == []
    assert account.is_untouched()
    _, listed = account.python("operate", "list", "--json")
    assert {each["stack"] for each in json.loads(listed)} == {
        named("TrainingStack"),
        "TextTeam-TrainingStack",
    }
    code, said = account.python("operate", "status", "run-1")
    assert code != 0
    assert said.count("/runs/run-1") == 2  # either's URI says which
    account.cli.run("destroy", "TrainingStack", "--force", "-c", "prefix=TextTeam-", app=False)
    assert account.aws.engine.missing_resources(both[:-1]) == []


@pytest.mark.parametrize(
    ("prefix", "stack"), [("VisionTeam-", "NetworkStack"), ("SoundTeam-", "TrainingStack")]
)
def test_fails_over_a_stack_of_others_before_anything_is_changed(
    account: Account, prefix: str, stack: str
) -> None:
    context = ("-c", f"prefix={prefix}")
    sentence = f"the stack {prefix}{stack} is not this project's"
    before = {each["StackName"] for each in account.stacks.describe_stacks()["Stacks"]}
    code, said = account.make("deploy", *context, *NEVER)
    assert code != 0 and sentence in said and "-c prefix=" in said
    code, said = account.make("destroy", *context, "--force")
    assert (code != 0) == (sentence in said) == (stack == "TrainingStack")
    code, said = account.python("stacks.doctor", *context)
    assert code == 1 and sentence in said
    code, said = account.python("review", "--deployed", *context)
    assert code == 2 and sentence in said
    assert account.is_untouched()
    assert {each["StackName"] for each in account.stacks.describe_stacks()["Stacks"]} == before


def test_a_review_finds_what_is_deployed_under_another_prefix(
    account: Account, tmp_path: Path
) -> None:
    account.cli.run("deploy", "DatasetStack", *NEVER, app=False)
    out = tmp_path / "review.md"
    context = ("-c", "prefix=NewTeam-", "--output", str(out))
    code, said = account.python("review", "--deployed", *context)
    assert code == 0, said
    note = f"**NewTeam-DatasetStack is built next to {named('DatasetStack')}, with nothing in it**"
    assert note in out.read_text()
    assert f"`-c prefix={named('')}` updates that one" in out.read_text()
