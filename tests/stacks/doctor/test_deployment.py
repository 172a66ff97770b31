"""The doctor on the account's bootstrap, on stacks that block a deploy, and on who is mailed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.stack_names import description_of
from stacks.doctor.account import DeployTarget
from stacks.doctor.deployment import alarm_email_is_confirmed, stacks_can_be_deployed
from stacks.parameters import StackParameters, context
from tests.stack_names import TRAINING
from tests.stacks.doctor.conftest import Clinic, Examine, bootstrapped_with


def target_of(parameters: dict[str, Any], **stack: Any) -> DeployTarget:
    """A target whose training stack is described so, and whose topic has no subscriber."""
    described = {"StackName": TRAINING, "Description": description_of("TrainingStack"), **stack}
    cloud = SimpleNamespace(
        get_paginator=lambda _: SimpleNamespace(paginate=lambda: [{"Stacks": [described]}]),
        list_subscriptions_by_topic=lambda TopicArn: {"Subscriptions": []},
    )
    fields = StackParameters.for_size("g5.2xlarge", **parameters)
    return DeployTarget(client=lambda _: cloud, region="eu-west-1", parameters=fields)


@pytest.mark.parametrize(
    ("key", "state"),
    [
        ("", "ok"),
        ("AWS_MANAGED_KEY", "ok"),
        ("arn:aws:kms:us-east-1:123456789012:key/1", "warning"),
    ],
)
def test_a_key_of_ones_own_for_the_bundle_must_admit_the_machines(
    healthy: Clinic, examine: Examine, key: str, state: str
) -> None:
    with bootstrapped_with(healthy, key):
        (line,) = examine(healthy)["bootstrap"]
    assert line["state"] == state
    if state == "warning":
        assert line["what"].startswith(f"the code bundle is encrypted with {key}: machines boot")
        assert line["fix"].startswith(f"aws kms get-key-policy --key-id {key} ")


def test_the_qualifier_is_the_one_that_synth_takes(
    healthy: Clinic, examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "cdk.json"
    own.write_text(context.CDK_JSON.read_text())
    monkeypatch.setattr(context, "CDK_JSON", own)
    assert examine(healthy)["bootstrap"][0]["state"] == "ok"
    own.with_name("cdk.context.json").write_text('{"@aws-cdk/core:bootstrapQualifier": "team1"}')
    (line,) = examine(healthy)["bootstrap"]
    assert "no /cdk-bootstrap/team1/version" in line["what"]
    assert line["fix"].endswith("--qualifier team1 --toolkit-stack-name CDKToolkit-team1")
    given = "@aws-cdk/core:bootstrapQualifier=hnb659fds"
    assert examine(healthy, given)["bootstrap"][0]["state"] == "ok"


@pytest.mark.parametrize(
    ("status", "says", "call"),
    [
        ("ROLLBACK_COMPLETE", "its first deploy failed, and it can only be", "delete-stack"),
        ("DELETE_FAILED", "its deletion failed, and it can only be deleted", "delete-stack"),
        ("UPDATE_ROLLBACK_FAILED", "UPDATE_ROLLBACK_FAILED", "continue-update-rollback"),
        ("CREATE_IN_PROGRESS", "wait for it", "wait stack-create-complete"),
        # This waiter ends where the stack does, with a failure.
        ("ROLLBACK_IN_PROGRESS", "wait for it", "wait stack-create-complete"),
        ("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", "wait for it", "wait stack-update-complete"),
        ("UPDATE_ROLLBACK_IN_PROGRESS", "wait for it", "wait stack-rollback-complete"),
        ("DELETE_IN_PROGRESS", "wait for it", "wait stack-delete-complete"),
    ],
)
def test_a_stack_that_blocks_a_deploy_is_told_with_the_command_for_its_status(
    status: str, says: str, call: str
) -> None:
    own = {"StackStatus": status, "EnableTerminationProtection": False}
    (*_, found) = stacks_can_be_deployed(target_of({}, **own))
    assert says in found.what
    assert found.fix == f"aws cloudformation {call} --stack-name {TRAINING} --region eu-west-1"


def test_a_protected_stack_whose_first_deploy_failed_is_unprotected_first() -> None:
    own = {"StackStatus": "ROLLBACK_COMPLETE", "EnableTerminationProtection": True}
    (*_, found) = stacks_can_be_deployed(target_of({}, **own))
    which = f"--stack-name {TRAINING} --region eu-west-1"
    assert found.fix == (
        "aws cloudformation update-termination-protection --no-enable-termination-protection "
        f"{which} && aws cloudformation delete-stack {which}"
    )
    # A deploy's own end needs no deletion.
    own["StackStatus"] = "UPDATE_IN_PROGRESS"
    (*_, found) = stacks_can_be_deployed(target_of({}, **own))
    assert found.fix.startswith("aws cloudformation wait ")


@pytest.mark.parametrize("email", ["", "me@example.org"])
def test_who_did_not_confirm_in_time_is_subscribed_again(email: str) -> None:
    """SNS deletes such a subscription, and a deploy would change nothing."""
    outputs = [{"OutputKey": "TopicArn", "OutputValue": "arn:aws:sns:eu-west-1:1:alarms"}]
    own = {"StackStatus": "CREATE_COMPLETE", "Outputs": outputs}
    (found,) = alarm_email_is_confirmed(target_of({"alarm.email": email}, **own))
    assert found.fix == (
        "aws sns subscribe --region eu-west-1 --topic-arn arn:aws:sns:eu-west-1:1:alarms "
        f"--protocol email --notification-endpoint {email or 'YOU@EXAMPLE.COM'}"
    )
