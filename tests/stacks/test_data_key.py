"""A key of the user's own: the statements that its policy needs, as they are printed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from embedded_aws import EmbeddedAws
from stacks.data_key import main
from tests.stacks.templates import only

Output = pytest.CaptureFixture[str]


def test_the_printed_statements_are_those_of_the_stacks_own_key(
    synthesize: Callable[..., Any], capsys: Output
) -> None:
    assert main(["arn:aws:kms:us-east-1:123456789012:key/1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    key = only(synthesize(kms="create")["DatasetStack"], "AWS::KMS::Key")
    own = {each.get("Sid"): each for each in key["KeyPolicy"]["Statement"]}
    for statement in printed:
        deployed = own[statement["Sid"]]
        assert sorted(statement["Action"]) == sorted(deployed["Action"])
        assert statement["Principal"] == deployed["Principal"]
        assert sorted(statement.get("Condition", {})) == sorted(deployed.get("Condition", {}))
    text = json.dumps(printed)
    assert "arn:aws:iam::123456789012:role/aws-service-role/spotfleet.amazonaws.com/" in text


def test_the_statements_are_of_the_keys_partition(capsys: Output) -> None:
    assert main(["arn:aws-cn:kms:cn-north-1:123456789012:key/mrk-1"]) == 0
    printed = capsys.readouterr().out
    assert "arn:aws-cn:iam::123456789012:role/aws-service-role/spot.amazonaws.com/" in printed
    assert "arn:aws:" not in printed


def test_another_account_gets_the_right_to_grant_the_key_to_its_roles(capsys: Output) -> None:
    """Its service-linked roles have no policy that names the key, so that key's cannot do."""
    assert main(["arn:aws:kms:us-east-1:222222222222:key/1", "111111111111"]) == 0
    shared, alarms = json.loads(capsys.readouterr().out)
    assert shared["Principal"] == {"AWS": "arn:aws:iam::111111111111:root"}
    assert {"kms:CreateGrant", "kms:ListGrants", "kms:Decrypt"} <= {*shared["Action"]}
    assert alarms["Sid"] == "AlarmsAndEventsPublish"


@pytest.mark.parametrize("arguments", [[], ["123456789012"], ["arn:aws:kms:a:123:key/1", "b"]])
def test_fails_without_the_arn_of_a_key(arguments: list[str], capsys: Output) -> None:
    assert main(arguments) == 2
    assert "usage: python -m stacks.data_key KEY_ARN" in capsys.readouterr().err


def test_buckets_key_and_access_logs_deploy_on_the_embedded_aws(
    synthesize: Callable[..., Any],
) -> None:
    template = synthesize(kms="create", access_logs="true")["DatasetStack"]
    with EmbeddedAws() as aws:
        aws.engine.patience_seconds = 120.0  # answers once the stack is done, however busy we are
        cloudformation, s3 = aws.client("cloudformation"), aws.client("s3")
        ssm = aws.client("ssm")
        # The template asks for the bootstrap's version.
        ssm.put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")
        cloudformation.create_stack(StackName="DatasetStack", TemplateBody=json.dumps(template))
        (stack,) = cloudformation.describe_stacks(StackName="DatasetStack")["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE"
        assert aws.engine.missing_resources(["DatasetStack"]) == []
        outputs = {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}
        for name in ("DatasetBucketName", "RunBucketName"):
            (rule,) = s3.get_bucket_encryption(Bucket=outputs[name])[
                "ServerSideEncryptionConfiguration"
            ]["Rules"]
            assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "aws:kms"
            logging = s3.get_bucket_logging(Bucket=outputs[name])["LoggingEnabled"]
            assert logging["TargetPrefix"] == name.removesuffix("Name") + "/"
