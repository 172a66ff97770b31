"""What only a real account can confirm: pytest -m aws. Reads only, unless AWS_TEST_USD is given.

docs/first-day-on-aws.md says what it does and costs. It never leaves an instance running: it ends
by destroying TrainingStack, and the Guard has max_hours=1 should this program be killed.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from review.assembly import CannotReview, deployed
from sizing import catalogue
from stacks.doctor.__main__ import main as doctor
from tests.aws.experiment import SIZE, WORST_HOURS, Experiment
from tests.stack_names import TRAINING

pytestmark = pytest.mark.aws
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def session() -> boto3.session.Session:
    """A session of the account, or a skip that says what is missing."""
    session = boto3.session.Session(region_name=os.environ.get("AWS_REGION"))
    if not session.region_name:
        pytest.skip("no region: export AWS_REGION=us-east-1")
    try:
        if session.get_credentials() is None:
            pytest.skip("no AWS credentials: aws sso login (AWS CLI 2), or export AWS_PROFILE=NAME")
        session.client("sts").get_caller_identity()
    except (BotoCoreError, ClientError) as error:
        pytest.skip(f"the AWS credentials do not work: {error}")
    return session


def test_the_doctor_finds_no_problem(
    session: boto3.session.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    code = doctor(["--json"])
    problems = [each for each in json.loads(capsys.readouterr().out) if each["state"] == "problem"]
    # An account without datasets is no sick account.
    assert [each for each in problems if each["check"] != "dataset"] == []
    assert code == bool(problems)


def test_the_launch_template_is_one_that_ec2_takes(session: boto3.session.Session) -> None:
    """A dry run of the deployed template: the image, volumes, profile and quota are looked at."""
    try:
        stack = deployed([TRAINING]).stacks.get(TRAINING)
    except CannotReview as reason:
        pytest.skip(str(reason))
    if stack is None:
        pytest.skip("no TrainingStack is deployed: npx cdk deploy TrainingStack")
    (name,) = [key for key, each in stack.resources.items()
               if each["Type"] == "AWS::EC2::LaunchTemplate"]  # fmt: skip
    template = session.client("cloudformation").describe_stack_resource(
        StackName=TRAINING, LogicalResourceId=name
    )["StackResourceDetail"]["PhysicalResourceId"]
    with pytest.raises(ClientError) as refusal:
        session.client("ec2").run_instances(
            MinCount=1, MaxCount=1, DryRun=True,
            LaunchTemplate={"LaunchTemplateId": template, "Version": "$Latest"},
        )  # fmt: skip
    assert refusal.value.response["Error"]["Code"] == "DryRunOperation", refusal.value


def test_the_review_reads_what_is_deployed(session: boto3.session.Session) -> None:
    done = subprocess.run(
        ["python", "-m", "review", "--deployed", "--json", "--fail-on", "never"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["base"].startswith("what is deployed in ")


@pytest.fixture
def experiment(session: boto3.session.Session, tmp_path: Path) -> Iterator[Experiment]:
    """A deployed run that may cost money; TrainingStack is destroyed whatever happens."""
    most = catalogue.hourly_price(SIZE).usd_per_hour * WORST_HOURS
    allowed = float(os.environ.get("AWS_TEST_USD", 0))
    if allowed < most:
        pytest.skip(f"it costs up to ${most:.2f}: export AWS_TEST_USD={most:.0f} to allow it")
    if TRAINING in deployed([TRAINING]).stacks:
        pytest.skip("a TrainingStack is deployed; a test does not touch it")
    experiment = Experiment(session, tmp_path)
    try:
        experiment.deploy()
        yield experiment
    finally:
        experiment.destroy()


def test_a_run_outlives_its_instance(experiment: Experiment) -> None:
    first = wait(experiment.committed_instance, minutes=25, what="a commit of the first instance")
    experiment.interrupt(first)
    second = wait(
        lambda: experiment.running_instance(other_than=first),
        minutes=20, what="a replacement",
    )  # fmt: skip
    receipt = wait(experiment.receipt, minutes=40, what=f"the receipt, from {second}")
    assert receipt["state"] == "finished"
    assert receipt["generations"] >= 2
    wait(lambda: experiment.target_capacity() == 0, minutes=12, what="the fleet at zero")
    wait(lambda: not experiment.instances(), minutes=10, what="no instance")
    assert experiment.volumes() == []


def wait(look: Callable[[], Any], *, minutes: float, what: str) -> Any:
    """Look every 15 seconds until there is something; fail after so many minutes."""
    deadline = time.monotonic() + minutes * 60 * float(os.environ.get("AWS_TEST_PATIENCE", 1))
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not come within {minutes:g} minutes"
        time.sleep(min(15, max(0.1, deadline - time.monotonic())))
    return found
