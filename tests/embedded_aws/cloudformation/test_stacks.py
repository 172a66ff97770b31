"""Stacks through the API: order, updates, replacements, rollbacks, exports, deletion."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.embedded_aws.cloudformation.conftest import Stacks
from tests.embedded_aws.cloudformation.resource_cases import TOPIC, group, parameter


def test_a_stack_has_outputs_tags_parameters_and_resources(stacks: Any) -> None:
    stack = stacks.create(
        "first",
        {"Topic": TOPIC, "Value": parameter({"Ref": "Topic"})},
        Parameters={"Word": {"Type": "String", "Default": "x"}},
        Outputs={"Topic": {"Value": {"Fn::GetAtt": ["Topic", "TopicName"]}, "Description": "d"}},
        values={"Word": "given"},
        tags={"Owner": "me"},
    )
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    topic = stacks.physical("first", "Topic")
    assert stack["Outputs"] == [
        {"OutputKey": "Topic", "OutputValue": topic.split(":")[-1], "Description": "d"}
    ]
    assert stack["Parameters"] == [{"ParameterKey": "Word", "ParameterValue": "given"}]
    ssm, sns = stacks.aws.client("ssm"), stacks.aws.client("sns")
    name = stacks.physical("first", "Value")
    assert ssm.get_parameter(Name=name)["Parameter"]["Value"] == topic
    tags = sns.list_tags_for_resource(ResourceArn=topic)["Tags"]
    assert tags == [{"Key": "Owner", "Value": "me"}]
    assert stacks.aws.engine.missing_resources(["first"]) == []


def test_a_resource_that_somebody_deleted_is_reported_missing(stacks: Any) -> None:
    stacks.create("robbed", {"Topic": TOPIC})
    topic = stacks.physical("robbed", "Topic")
    stacks.aws.client("sns").delete_topic(TopicArn=topic)
    assert stacks.aws.engine.missing_resources(["robbed"]) == [
        f"robbed: Topic (AWS::SNS::Topic {topic})"
    ]
    client = stacks.aws.client("cloudformation")
    assert stack_drift(client) == "NOT_CHECKED"
    detection = client.detect_stack_drift(StackName="robbed")["StackDriftDetectionId"]
    found = client.describe_stack_drift_detection_status(StackDriftDetectionId=detection)
    assert (found["DetectionStatus"], found["StackDriftStatus"]) == (
        "DETECTION_COMPLETE",
        "DRIFTED",
    )
    assert stack_drift(client) == "DRIFTED"
    (gone,) = client.describe_stack_resource_drifts(StackName="robbed")["StackResourceDrifts"]
    assert (gone["LogicalResourceId"], gone["StackResourceDriftStatus"]) == ("Topic", "DELETED")


def stack_drift(client: Any) -> str:
    (found,) = client.describe_stacks(StackName="robbed")["Stacks"]
    return str(found["DriftInformation"]["StackDriftStatus"])


def test_an_update_in_place_keeps_the_resource(stacks: Any) -> None:
    stacks.create("placed", {"Group": group(RetentionInDays=7)})
    before = stacks.physical("placed", "Group")
    stack = stacks.update("placed", {"Group": group(RetentionInDays=30)})
    assert stack["StackStatus"] == "UPDATE_COMPLETE"
    assert stacks.physical("placed", "Group") == before
    logs = stacks.aws.client("logs").describe_log_groups(logGroupNamePrefix=before)["logGroups"]
    assert logs[0]["retentionInDays"] == 30


def test_a_replacement_makes_the_new_one_first_and_then_deletes_the_old(stacks: Any) -> None:
    stacks.create("moved", {"Group": group(LogGroupName="old"), "Topic": TOPIC})
    stacks.update("moved", {"Group": group(LogGroupName="new")})
    assert stacks.physical("moved", "Group") == "new"
    assert stacks.statuses("moved", "Group")[-4:] == [
        "UPDATE_IN_PROGRESS",
        "UPDATE_COMPLETE",
        "DELETE_IN_PROGRESS",
        "DELETE_COMPLETE",
    ]
    names = stacks.aws.client("logs").describe_log_groups()["logGroups"]
    assert "old" not in [item["logGroupName"] for item in names]
    assert stacks.statuses("moved", "Topic")[-1] == "DELETE_COMPLETE"


def test_what_is_retained_survives_its_stack_and_its_replacement(stacks: Any) -> None:
    kept = {**group(LogGroupName="kept"), "DeletionPolicy": "Retain"}
    stacks.create("retaining", {"Group": kept})
    stacks.delete("retaining")
    names = stacks.aws.client("logs").describe_log_groups(logGroupNamePrefix="kept")
    assert len(names["logGroups"]) == 1


def test_fails_and_rolls_a_creation_back(stacks: Any) -> None:
    resources = {
        "Topic": TOPIC,
        "Bad": {
            "Type": "AWS::SNS::TopicPolicy",
            "Properties": {
                "Topics": [{"Fn::Sub": "${Topic}x"}],
                "PolicyDocument": {"Version": "2012-10-17", "Statement": []},
            },
        },
    }
    stack = stacks.create("broken", resources)
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"
    assert stacks.statuses("broken", "Topic")[-1] == "DELETE_COMPLETE"
    assert "CREATE_FAILED" in stacks.statuses("broken", "Bad")
    assert any("failed to create: [Bad]" in reason for reason in stacks.reasons("broken"))
    with pytest.raises(ClientError, match="ROLLBACK_COMPLETE state and can not be updated"):
        stacks.update("broken", {"Topic": TOPIC})


def test_fails_and_rolls_an_update_back(stacks: Any) -> None:
    stacks.create("shaken", {"A": parameter("1"), "Group": group(LogGroupName="g1")})
    name = stacks.physical("shaken", "A")
    stack = stacks.update(
        "shaken",
        {
            "A": parameter("2"),
            "Group": group(LogGroupName="g2"),
            "New": TOPIC,
            "Bad": {
                **parameter("x", AllowedPattern="[0-9]+", Name="/aws/service/mine"),
                "DependsOn": ["A", "Group", "New"],
            },
        },
    )
    assert stack["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    ssm = stacks.aws.client("ssm")
    assert ssm.get_parameter(Name=name)["Parameter"]["Value"] == "1"
    assert stacks.physical("shaken", "Group") == "g1"
    assert stacks.statuses("shaken", "New")[-1] == "DELETE_COMPLETE"
    assert stacks.update("shaken", {"A": parameter("3")})["StackStatus"] == "UPDATE_COMPLETE"


def test_a_failed_creation_stays_when_rollback_is_off(stacks: Any) -> None:
    bad = parameter("x", Name="/aws/service/mine")
    stack = stacks.create("kept", {"Topic": TOPIC, "Bad": {**bad, "DependsOn": "Topic"}},
                          DisableRollback=True)  # fmt: skip
    assert stack["StackStatus"] == "CREATE_FAILED"
    assert stacks.update("kept", {"Topic": TOPIC})["StackStatus"] == "UPDATE_COMPLETE"


def test_fails_before_anything_is_touched_when_a_property_is_wrong(stacks: Any) -> None:
    stack = stacks.create("invalid", {"Topic": TOPIC, "Group": group(RetentionInDays=8)})
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"
    assert stacks.statuses("invalid", "Topic") == []
    reason = next(text for text in stacks.reasons("invalid") if "Properties validation" in text)
    assert "for resource Group" in reason and "#/RetentionInDays: 8 is not" in reason


def test_fails_when_a_named_resource_exists_already(stacks: Any) -> None:
    stacks.create("one", {"Group": group(LogGroupName="same")})
    stack = stacks.create("two", {"Group": group(LogGroupName="same")})
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"
    wanted = "Resource of type 'AWS::Logs::LogGroup' with identifier 'same' already exists."
    assert wanted in stacks.reasons("two")
    assert stacks.aws.engine.missing_resources(["one"]) == []


def test_fails_to_replace_a_resource_under_its_own_name(stacks: Any) -> None:
    def profile(path: str) -> dict[str, Any]:
        properties = {"InstanceProfileName": "mine", "Roles": [], "Path": path}
        return {"Type": "AWS::IAM::InstanceProfile", "Properties": properties}

    stacks.create("custom", {"A": profile("/a/")})
    assert stacks.update("custom", {"A": profile("/b/")})["StackStatus"] == (
        "UPDATE_ROLLBACK_COMPLETE"
    )
    wanted = "when a custom-named resource requires replacing. Rename mine and update the stack"
    assert any(wanted in reason for reason in stacks.reasons("custom"))
    assert stacks.aws.engine.missing_resources(["custom"]) == []


def test_a_name_that_is_taken_away_makes_a_new_resource(stacks: Any) -> None:
    def alarm(**properties: Any) -> dict[str, Any]:
        base = {"AlarmName": "named", "ComparisonOperator": "LessThanThreshold"}
        return {"Type": "AWS::CloudWatch::Alarm", "Properties": base | properties}

    metric = {"EvaluationPeriods": 1, "MetricName": "m", "Namespace": "n", "Period": 60,
              "Statistic": "Sum", "Threshold": 1}  # fmt: skip
    stacks.create("named", {"A": alarm(**metric)})
    assert stacks.physical("named", "A") == "named"
    unnamed = alarm(**metric)
    del unnamed["Properties"]["AlarmName"]
    stacks.update("named", {"A": unnamed})
    generated = stacks.physical("named", "A")
    assert generated.startswith("named-A-")
    found = stacks.aws.client("cloudwatch").describe_alarms()["MetricAlarms"]
    assert [item["AlarmName"] for item in found] == [generated]


def test_what_was_retained_does_not_stand_in_the_way_of_its_successor(stacks: Any) -> None:
    kept = {"Type": "AWS::S3::Bucket", "DeletionPolicy": "Retain"}
    stacks.create("again", {"Topic": TOPIC, "Bucket": kept})
    first = stacks.physical("again", "Bucket")
    stacks.update("again", {"Topic": TOPIC})
    stacks.update("again", {"Topic": TOPIC, "Bucket": kept})
    assert stacks.physical("again", "Bucket") != first
    buckets = stacks.aws.client("s3").list_buckets()["Buckets"]
    assert first in [item["Name"] for item in buckets]


@pytest.mark.parametrize(
    ("resources", "more", "message"),
    [
        ({"A": {"Type": "AWS::EC2::Nonsense"}}, {}, "Unrecognized resource types: [AWS::EC2::No"),
        ({"A": {"Type": "Custom::Thing"}}, {}, "Unrecognized resource types: [Custom::Thing]"),
        ({"A": {"Type": "AWS::EKS::Cluster"}}, {}, "the embedded AWS cannot create them"),
        (
            {"A": TOPIC, "B": parameter({"Fn::GetAtt": ["A", "Colour"]})},
            {},
            "resource A does not support attribute type Colour in Fn::GetAtt",
        ),
        ({"A": TOPIC}, {"values": {"X": "1"}}, "Parameters: [X] do not exist in the template"),
        ({"A": parameter({"Fn::ImportValue": "nowhere"})}, {}, "No export named nowhere found."),
        (
            {"A": {"Type": "AWS::IAM::Role", "Properties": {"RoleName": "r"}}},
            {"Capabilities": []},
            "Requires capabilities : [CAPABILITY_NAMED_IAM]",
        ),
    ],
)
def test_fails_on_a_template_that_cannot_work(
    stacks: Any, resources: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    assert message in stacks.refusal("refused", resources, **more)
    with pytest.raises(ClientError, match="Stack with id refused does not exist"):
        stacks.describe("refused")


def test_fails_to_update_without_a_change(stacks: Any) -> None:
    stacks.create("still", {"Topic": TOPIC})
    with pytest.raises(ClientError, match=r"No updates are to be performed\."):
        stacks.update("still", {"Topic": TOPIC})


def test_exports_are_imported_and_guarded(stacks: Any) -> None:
    def exporting(topic: str) -> dict[str, Any]:
        return {"Outputs": {"Topic": {"Value": {"Ref": topic}, "Export": {"Name": "shared"}}}}

    stacks.create("exporter", {"A": TOPIC, "B": TOPIC}, **exporting("A"))
    stacks.create("importer", {"Value": parameter({"Fn::ImportValue": "shared"})})
    name = stacks.physical("importer", "Value")
    stored = stacks.aws.client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
    assert stored == stacks.physical("exporter", "A")
    in_use = r"Export shared cannot be deleted as it is in use by importer"
    with pytest.raises(ClientError, match=in_use):
        stacks.delete("exporter")
    stack = stacks.update("exporter", {"A": TOPIC, "B": TOPIC})
    assert stack["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    assert any(in_use in reason for reason in stacks.reasons("exporter"))
    stacks.update("exporter", {"A": TOPIC, "B": TOPIC}, **exporting("B"))
    assert any("shared cannot be updated" in reason for reason in stacks.reasons("exporter"))
    stack = stacks.create("rival", {"A": TOPIC}, **exporting("A"))
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"
    assert any("already exported by stack exporter" in item for item in stacks.reasons("rival"))


def test_fails_to_delete_a_protected_stack(stacks: Any) -> None:
    stacks.create("guarded", {"Topic": TOPIC}, EnableTerminationProtection=True)
    with pytest.raises(ClientError, match="TerminationProtection is enabled"):
        stacks.delete("guarded")
    stacks.client.update_termination_protection(
        StackName="guarded", EnableTerminationProtection=False
    )
    stacks.delete("guarded")
    with pytest.raises(ClientError, match="Stack with id guarded does not exist"):
        stacks.describe("guarded")


def test_fails_to_delete_a_bucket_with_objects_and_keeps_what_it_needs(stacks: Any) -> None:
    stacks.create("full", {"Bucket": {"Type": "AWS::S3::Bucket"}})
    bucket, s3 = stacks.physical("full", "Bucket"), stacks.aws.client("s3")
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    stacks.delete("full")
    assert stacks.describe("full")["StackStatus"] == "DELETE_FAILED"
    s3.delete_object(Bucket=bucket, Key="k")
    stacks.delete("full")
    with pytest.raises(ClientError, match="does not exist"):
        stacks.describe("full")


def test_the_api_answers_while_a_slow_creation_runs(stacks: Any) -> None:
    stacks.aws.engine.patience_seconds = 0.0
    try:
        stacks.create("slow", {f"Topic{number}": TOPIC for number in range(20)})
        assert stacks.describe("slow")["StackStatus"] == "CREATE_IN_PROGRESS"
        with pytest.raises(ClientError, match="CREATE_IN_PROGRESS state and can not be updated"):
            stacks.update("slow", {"Topic": TOPIC})
    finally:
        stacks.aws.engine.patience_seconds = 120.0
    stacks.client.get_waiter("stack_create_complete").wait(
        StackName="slow", WaiterConfig={"Delay": 1, "MaxAttempts": 20}
    )


def test_a_dynamic_reference_is_read_again_by_any_change_and_by_no_other_deploy(
    stacks: Stacks,
) -> None:
    ssm = stacks.aws.client("ssm")
    ssm.put_parameter(Name="/newest", Value="one", Type="String")
    joined = {"Fn::Join": ["-", ["is", "{{resolve:ssm:/newest}}"]]}
    copied = {"Type": "AWS::SSM::Parameter", "Properties": {"Type": "String", "Value": joined}}

    def value() -> str:
        name = stacks.physical("dynamic", "Copy")
        return str(ssm.get_parameter(Name=name)["Parameter"]["Value"])

    stacks.create("dynamic", {"Copy": copied})
    assert value() == "is-one"
    ssm.put_parameter(Name="/newest", Value="two", Type="String", Overwrite=True)
    with pytest.raises(ClientError, match="No updates are to be performed"):
        stacks.update("dynamic", {"Copy": copied})
    assert value() == "is-one"
    stacks.update("dynamic", {"Copy": copied, "Other": {"Type": "AWS::SNS::Topic"}})
    assert value() == "is-two"


def test_fails_on_a_dynamic_reference_to_what_is_not_there(stacks: Stacks) -> None:
    for reference, why in (("ssm:/none", r"Parameters: \[ssm:/none\] cannot be found"),
                           ("secretsmanager:x", "does not resolve")):  # fmt: skip
        topic = {"Type": "AWS::SNS::Topic", "Properties": {
            "DisplayName": f"{{{{resolve:{reference}}}}}"}}  # fmt: skip
        with pytest.raises(ClientError, match=why):
            stacks.create("dynamic", {"Topic": topic})


def test_fails_what_refers_to_a_resource_whose_condition_is_false(stacks: Any) -> None:
    words = r"Unresolved resource dependencies \[Topic\] in the {} block of the template"
    off = {"Conditions": {"Is": {"Fn::Equals": [{"Ref": "On"}, "yes"]}}, "values": {"On": "no"}}
    off["Parameters"] = {"On": {"Type": "String"}}
    topic = TOPIC | {"Condition": "Is"}
    resources = {"Topic": topic, "Value": parameter({"Ref": "Topic"})}
    chosen = {"Fn::If": ["Is", {"Ref": "Topic"}, "none"]}
    attribute = {"Topic": topic, "Value": parameter({"Fn::GetAtt": ["Topic", "TopicName"]})}
    stacks.create("on-and-off", resources, **off | {"values": {"On": "yes"}})
    for wrong in (resources, attribute):
        with pytest.raises(ClientError, match=words.format("Resources")):
            stacks.update("on-and-off", wrong, **off)
        with pytest.raises(ClientError, match=words.format("Resources")):
            stacks.create("always-off", wrong, **off)
    right = {"Topic": topic, "Value": parameter(chosen)}
    with pytest.raises(ClientError, match=words.format("Outputs")):
        stacks.update("on-and-off", right, Outputs={"Arn": {"Value": {"Ref": "Topic"}}}, **off)
    assert stacks.update("on-and-off", right, **off)["StackStatus"] == "UPDATE_COMPLETE"


@pytest.mark.parametrize("name", ["Topic", "Nowhere"])
def test_fails_a_condition_that_refers_to_what_is_no_parameter(stacks: Any, name: str) -> None:
    conditions = {"Is": {"Fn::Equals": [{"Ref": name}, "yes"]}}
    words = rf"Unresolved dependencies \[{name}\]. Cannot reference resources in the Conditions"
    with pytest.raises(ClientError, match=words):
        stacks.create("conditional", {"Topic": TOPIC}, Conditions=conditions)
