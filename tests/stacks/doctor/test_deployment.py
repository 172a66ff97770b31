"""The doctor on the account's bootstrap, on stacks that block a deploy, and on who is mailed."""

import dataclasses
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.stack_names import description_of
from stacks.data_key import SERVICE_LINKED_ROLES
from stacks.doctor.account import DeployTarget
from stacks.doctor.deployment import (
    alarm_email_is_confirmed,
    buckets_can_be_used,
    dataset_is_uploaded,
    key_can_be_used,
    stacks_can_be_deployed,
)
from stacks.parameters import StackParameters, context
from tests.stack_names import TRAINING
from tests.stacks.doctor.conftest import Clinic, Examine, bootstrapped_with

AT = "us-east-1"


def target_of(
    parameters: dict[str, Any], subscriptions: Sequence[Any] = (), **stack: Any
) -> DeployTarget:
    """A target whose training stack is described so, and whose topic has these subscribers."""
    described = {"StackName": TRAINING, "Description": description_of("TrainingStack"), **stack}
    cloud = SimpleNamespace(
        get_paginator=lambda _: SimpleNamespace(paginate=lambda: [{"Stacks": [described]}]),
        list_subscriptions_by_topic=lambda TopicArn: {"Subscriptions": subscriptions},
    )
    fields = StackParameters.for_size("g5.2xlarge", **parameters)
    return DeployTarget(client=lambda _: cloud, region="eu-west-1", parameters=fields)


@pytest.mark.parametrize(
    ("key", "toolkit", "state"),
    [
        ("", "CDKToolkit", "ok"),
        ("AWS_MANAGED_KEY", "CDKToolkit", "ok"),
        # Of `cdk bootstrap --toolkit-stack-name`: found by its qualifier.
        ("arn:aws:kms:us-east-1:123456789012:key/1", "corp-toolkit", "warning"),
    ],
)
def test_a_key_of_ones_own_for_the_bundle_must_admit_the_machines(
    healthy: Clinic, examine: Examine, key: str, toolkit: str, state: str
) -> None:
    with bootstrapped_with(healthy, key, toolkit):
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
    monkeypatch.setenv("HOME", str(tmp_path))
    assert examine(healthy)["bootstrap"][0]["state"] == "ok"
    of_user = {"context": {"@aws-cdk/core:bootstrapQualifier": "corp"}}
    (tmp_path / ".cdk.json").write_text(json.dumps(of_user))  # the weakest
    assert context.qualifier() == "corp"
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


def test_how_to_confirm_where_a_mail_scanner_follows_links() -> None:
    topic = "arn:aws:sns:eu-west-1:1:alarms"
    own = {"Outputs": [{"OutputKey": "TopicArn", "OutputValue": topic}]}
    pending = [{"Endpoint": "me@example.org", "SubscriptionArn": "PendingConfirmation"}]
    (found,) = alarm_email_is_confirmed(
        target_of({}, pending, StackStatus="CREATE_COMPLETE", **own)
    )
    assert found.state == "problem"
    command = f"aws sns confirm-subscription --region eu-west-1 --topic-arn {topic} --token "
    assert command in found.what and "--authenticate-on-unsubscribe true" in found.what


def run_bucket(client: Any, kms: str = "", name: str = "my-runs") -> DeployTarget:
    given = {"kms": kms, "run_bucket": name}
    parameters = StackParameters.for_size("g5.xlarge", **given)
    return DeployTarget(client=client, region=AT, parameters=parameters, options=" -c a=b")


def test_a_run_bucket_is_one_that_machines_may_write_to(healthy: Clinic) -> None:
    s3, kms = healthy.aws.client("s3"), healthy.aws.client("kms")
    s3.create_bucket(Bucket="my-runs")
    (found,) = buckets_can_be_used(run_bucket(healthy.client))
    assert (found.state, found.what) == ("ok", "s3://my-runs is in us-east-1")
    own, other = (kms.create_key()["KeyMetadata"] for _ in range(2))
    default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": own["KeyId"]}
    rules = [{"ApplyServerSideEncryptionByDefault": default}]
    s3.put_bucket_encryption(Bucket="my-runs", ServerSideEncryptionConfiguration={"Rules": rules})
    (found,) = buckets_can_be_used(run_bucket(healthy.client))
    assert found.state == "problem"
    assert found.what.endswith(f", encrypted with {own['Arn']}, which no machine may use")
    assert found.fix == f"npx cdk deploy TrainingStack -c a=b -c kms={own['Arn']}"
    (found,) = buckets_can_be_used(run_bucket(healthy.client, own["Arn"]))
    assert found.state == "ok"
    for key in (other["Arn"], "create"):  # whose data nothing could read under another key
        (found,) = buckets_can_be_used(run_bucket(healthy.client, key))
        assert found.state == "problem" and own["Arn"] not in found.fix
        assert found.fix.startswith("npx cdk deploy DatasetStack -c a=b -c run_bucket=   #")
    (found,) = buckets_can_be_used(run_bucket(healthy.client, name="mistyped"))
    assert (found.state, found.what) == ("problem", "s3://mistyped does not exist")
    s3.create_bucket(Bucket="far-runs", CreateBucketConfiguration={"LocationConstraint": "EU"})
    (found,) = buckets_can_be_used(run_bucket(healthy.client, name="far-runs"))
    assert found.fix == "AWS_REGION=eu-west-1 npx cdk deploy TrainingStack -c a=b"


@pytest.mark.parametrize("kms", [f"arn:aws:kms:us-east-1:{12 * '1'}:key/runs", "create"])
def test_a_dataset_under_another_key_is_copied_not_the_runs_moved(kms: str) -> None:
    manifest = json.dumps({"files": [{"name": "a", "bytes": 1}]}).encode()
    theirs = f"arn:aws:kms:us-east-1:{12 * '1'}:key/dataset"
    client = SimpleNamespace(
        get_object=lambda **_: {"Body": BytesIO(manifest), "SSEKMSKeyId": theirs},
        describe_key=lambda KeyId: {"KeyMetadata": {"Arn": KeyId, "KeyManager": "CUSTOMER"}},
    )
    target = target_of({"kms": kms, "dataset_bucket": "corp-data"})
    (found,) = dataset_is_uploaded(dataclasses.replace(target, client=lambda _: client, region=AT))
    assert found.state == "problem" and f"encrypted with {theirs}" in found.what
    copy = "# has your key: copy the data there"
    assert found.fix == f"npx cdk deploy DatasetStack -c dataset_bucket=   {copy}"


@pytest.mark.parametrize(("grantee", "num_problems"), [(12 * "1", 0), (12 * "2", 2)])
def test_a_key_of_another_account_is_granted_to_the_roles_of_this_one(
    grantee: str, num_problems: int
) -> None:
    """KMS shows its grants, but never its policy."""
    granted = [
        {"GranteePrincipal": f"arn:aws:iam::{grantee}:role/aws-service-role/{role}"}
        for role in SERVICE_LINKED_ROLES["spot"]
    ]
    client = SimpleNamespace(
        get_caller_identity=lambda: {"Account": 12 * "1"},
        describe_key=lambda KeyId: {"KeyMetadata": {"KeyState": "Enabled"}},
        get_paginator=lambda _: SimpleNamespace(paginate=lambda KeyId: [{"Grants": granted}]),
    )
    key = f"arn:aws:kms:{AT}:{12 * '2'}:key/1"
    *problems, last = key_can_be_used(run_bucket(lambda _: client, key))
    assert len(problems) == num_problems
    for each in problems:
        assert f"--grantee-principal arn:aws:iam::{12 * '1'}:role/aws-service-role/" in each.fix
    assert last.state == "warning" and f"{12 * '2'} sees whether it allows" in last.what
