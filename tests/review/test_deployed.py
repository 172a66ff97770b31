"""`python -m review --deployed` against the embedded AWS: what is deployed is the base."""

import io
import json
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

import boto3
import pytest
from werkzeug.wrappers import Response

from embedded_aws import EmbeddedAws
from embedded_aws.front import Front
from embedded_aws.moto_services import signed_for
from review.__main__ import main
from review.assembly import CannotReview, Side, StackSide, deployed, drift_of
from tests.review.conftest import REPOSITORY, changed
from tests.stack_names import DATASET, TRAINING


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedAws]:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it would keep an earlier account's key
    with EmbeddedAws() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = main(["--deployed", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


class Gate:
    """Stands before the embedded AWS, which checks no permission: it lets ReviewStack's role in."""

    ALLOWED = (b"Action=GetTemplate", b"Action=DescribeStacks", b"Action=GetCallerIdentity")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_closed = False
        self.turned_away: set[str] = set()
        inside = Front.__call__

        def call(front: Front, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            if not self.is_closed:
                return inside(front, environ, start_response)
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
            if any(each in body for each in self.ALLOWED):
                return inside(front, environ, start_response)
            self.turned_away.add(signed_for(environ)[0])
            text = "<Code>AccessDenied</Code><Message>not for this role</Message>"
            answer = Response(f"<ErrorResponse><Error>{text}</Error></ErrorResponse>", 403)
            return answer(environ, start_response)

        monkeypatch.setattr(Front, "__call__", call)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.mark.slow
def test_what_is_deployed_is_the_base(
    gate: Gate, aws: EmbeddedAws, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nothing is deployed: both stacks are new.
    code, answer = facts(capsys)
    assert code == 0
    assert f"{DATASET} is new" in str(answer["effects"])
    for command in (["bootstrap"], ["deploy", "TrainingStack", "--require-approval", "never"]):
        subprocess.run(
            ["npx", "--no-install", "cdk", *command],
            cwd=REPOSITORY, check=True, capture_output=True,
        )  # fmt: skip
    # From here on with no more than the role of ReviewStack may: the CLI asks for its look-up role,
    # and goes on without.
    gate.is_closed = True
    code, answer = facts(capsys)
    assert (code, answer["effects"]) == (0, []), "what is deployed has no plan to compare with"
    assert gate.turned_away == {"sts", "cloudformation"}, "drift may not be looked for"
    code, answer = facts(capsys, "-c", "size=g5.4xlarge")
    assert code == 0
    assert sorted(each["type"] for each in answer["changes"]) == [  # type: ignore[attr-defined]
        "AWS::EC2::LaunchTemplate",
        "AWS::EC2::SpotFleet",
        "AWS::Lambda::Function",  # the Guard counts with the sizes' prices
    ]
    # Someone deletes a log group by hand: told where CloudFormation may look, and what it found
    # last where it may not.
    gate.is_closed = False
    (group,) = [each for each in boto3.client("logs").describe_log_groups()["logGroups"]
                if each["logGroupName"].startswith("/aws/events/")]  # fmt: skip
    boto3.client("logs").delete_log_group(logGroupName=group["logGroupName"])
    for is_closed, told in ((False, " is gone"), (True, "so CloudFormation found on 2")):
        gate.is_closed = is_closed
        code, answer = facts(capsys)
        (drift,) = answer["effects"]  # type: ignore[misc]
        assert (code, drift["kind"], drift["stack"]) == (0, "drift", TRAINING)
        assert told in drift["what"]
        assert "**Drift: 1.**" in str(answer["headline"])


def test_each_stack_is_looked_for_in_its_own_region(aws: EmbeddedAws, base: Side) -> None:
    assert deployed(base).name == f"what is deployed in {aws.region}"
    # The embedded AWS answers for any region with its own stacks.
    abroad = deployed(changed(base, region="eu-west-1"))
    assert abroad.name == f"what is deployed in eu-west-1, {aws.region}"


def test_a_stack_is_read_in_either_language_if_it_was_deployed(aws: EmbeddedAws) -> None:
    """Without a bootstrap the CLI sends YAML; prepare-change-set leaves a stack without one."""
    client = boto3.client("cloudformation")
    yaml = "Resources:\n  Topic:\n    Type: AWS::SNS::Topic\n"
    client.create_stack(StackName="Plain", TemplateBody=yaml)
    client.create_change_set(
        StackName="Drafted", ChangeSetName="it", ChangeSetType="CREATE", TemplateBody=yaml
    )
    head = Side(name="head", stacks={name: StackSide(template={}, name=name)
                                     for name in ("Plain", "Drafted")})  # fmt: skip
    found = deployed(head).stacks
    assert {name: dict(side.resources) for name, side in found.items()} == {
        "Plain": {"Topic": {"Type": "AWS::SNS::Topic"}}
    }


@pytest.mark.parametrize(
    ("path", "is_told"),
    [
        ("/SpotFleetRequestConfigData/TargetCapacity", False),
        ("/SpotFleetRequestConfigData/LaunchTemplateConfigs/0/Overrides/1/SubnetId", False),
        ("/MaxSize", False),
        ("/MinSize", False),
        ("/VPCZoneIdentifier/1", False),
        ("/SpotFleetRequestConfigData/AllocationStrategy", True),
        ("/MixedInstancesPolicy/InstancesDistribution/SpotAllocationStrategy", True),
    ],
)
def test_what_the_guard_sets_is_no_drift(path: str, is_told: bool) -> None:
    difference = {"PropertyPath": path, "ExpectedValue": "1", "ActualValue": "0"}
    resource = {"LogicalResourceId": "Fleet", "StackResourceDriftStatus": "MODIFIED"}
    told = list(drift_of({**resource, "PropertyDifferences": [difference]}))
    assert told == [f"Fleet: {path[1:]} 1 → 0"] * is_told


def test_fails_without_credentials(monkeypatch: pytest.MonkeyPatch, base: Side) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(CannotReview, match="cannot be read: no AWS credentials found"):
        deployed(base)
