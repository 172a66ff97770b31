"""Change sets: what they say would happen, and what happens."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.embedded_aws.cloudformation.resource_cases import TOPIC, group, parameter


def changes(change_set: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
    found = [item["ResourceChange"] for item in change_set["Changes"]]
    return {item["LogicalResourceId"]: (item["Action"], item.get("Replacement")) for item in found}


def test_a_change_set_creates_a_stack_with_outputs_and_exports(stacks: Any) -> None:
    outputs = {"T": {"Value": {"Ref": "Topic"}, "Export": {"Name": "made-by-change-set"}}}
    drafted = stacks.change_set("drafted", {"Topic": TOPIC}, kind="CREATE", Outputs=outputs)
    assert (drafted["Status"], drafted["ExecutionStatus"]) == ("CREATE_COMPLETE", "AVAILABLE")
    assert changes(drafted) == {"Topic": ("Add", None)}
    assert stacks.describe("drafted")["StackStatus"] == "REVIEW_IN_PROGRESS"
    stacks.client.execute_change_set(StackName="drafted", ChangeSetName="change")
    stack = stacks.describe("drafted")
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    assert stack["Outputs"][0]["ExportName"] == "made-by-change-set"
    exports = stacks.client.list_exports()["Exports"]
    assert [item["Name"] for item in exports] == ["made-by-change-set"]


def test_changes_say_what_is_replaced_and_what_follows_from_it(stacks: Any) -> None:
    stacks.create(
        "watched",
        {
            "Gone": TOPIC,
            "Kept": group(RetentionInDays=7),
            "Moved": group(LogGroupName="a"),
            "Follows": parameter({"Ref": "Moved"}),
            "Rests": parameter({"Ref": "Kept"}),
        },
    )
    drafted = stacks.change_set(
        "watched",
        {
            "New": TOPIC,
            "Kept": group(RetentionInDays=30),
            "Moved": group(LogGroupName="b"),
            "Follows": parameter({"Ref": "Moved"}),
            "Rests": parameter({"Ref": "Kept"}),
        },
    )
    assert changes(drafted) == {
        "New": ("Add", None),
        "Gone": ("Remove", None),
        "Kept": ("Modify", "False"),
        "Moved": ("Modify", "True"),
        "Follows": ("Modify", "False"),
    }
    details = {
        item["ResourceChange"]["LogicalResourceId"]: item["ResourceChange"]["Details"]
        for item in drafted["Changes"]
    }
    assert details["Moved"][0]["Target"]["RequiresRecreation"] == "Always"
    assert details["Follows"][0]["Evaluation"] == "Dynamic"


def test_a_property_that_may_replace_is_conditional(stacks: Any) -> None:
    resources = {"First": group(LogGroupName="c"), "Second": group(LogGroupName={"Ref": "First"})}
    resources["Second"]["Properties"]["LogGroupName"] = {"Fn::Sub": "${First}-2"}
    stacks.create("chain", resources)
    resources["First"] = group(LogGroupName="d")
    drafted = stacks.change_set("chain", resources)
    assert changes(drafted)["Second"] == ("Modify", "Conditional")
    stacks.client.execute_change_set(StackName="chain", ChangeSetName="change")
    assert stacks.physical("chain", "Second") == "d-2"


def test_fails_without_changes_in_the_words_that_the_cli_knows(stacks: Any) -> None:
    stacks.create("quiet", {"Topic": TOPIC})
    drafted = stacks.change_set("quiet", {"Topic": TOPIC})
    assert drafted["Status"] == "FAILED"
    assert drafted["StatusReason"].startswith("The submitted information didn't contain changes.")
    with pytest.raises(ClientError, match="cannot be executed"):
        stacks.client.execute_change_set(StackName="quiet", ChangeSetName="change")


def test_a_new_tag_or_output_alone_is_a_change(stacks: Any) -> None:
    stacks.create("small", {"Topic": TOPIC})
    outputs = {"T": {"Value": {"Ref": "Topic"}}}
    drafted = stacks.change_set("small", {"Topic": TOPIC}, Outputs=outputs)
    assert (drafted["Status"], drafted["Changes"]) == ("CREATE_COMPLETE", [])
    stacks.client.delete_change_set(StackName="small", ChangeSetName="change")
    drafted = stacks.change_set("small", {"Topic": TOPIC}, tags={"a": "b"})
    assert changes(drafted) == {"Topic": ("Modify", "False")}
    assert drafted["Changes"][0]["ResourceChange"]["Scope"] == ["Tags"]


def test_fails_early_on_wrong_properties_and_says_where(stacks: Any) -> None:
    drafted = stacks.change_set("early", {"Group": group(RetentionInDays=8)}, kind="CREATE")
    assert drafted["Status"] == "FAILED"
    assert "AWS::EarlyValidation::PropertyValidation" in drafted["StatusReason"]
    events = stacks.client.describe_events(
        StackName="early", ChangeSetName="change", Filters={"FailedEvents": True}
    )["OperationEvents"]
    assert events[0]["LogicalResourceId"] == "Group"
    assert events[0]["ValidationPath"] == "/Resources/Group/Properties/RetentionInDays"
    assert "8 is not a valid enum value" in events[0]["ValidationStatusReason"]


def test_fails_on_a_change_set_or_stack_that_does_not_exist(stacks: Any) -> None:
    with pytest.raises(ClientError, match="Stack with id nobody does not exist"):
        stacks.change_set("nobody", {"Topic": TOPIC})
    stacks.create("alone", {"Topic": TOPIC})
    with pytest.raises(ClientError, match=r"ChangeSet \[none\] does not exist"):
        stacks.client.describe_change_set(StackName="alone", ChangeSetName="none")
    with pytest.raises(ClientError, match="already exists and cannot be created again"):
        stacks.change_set("alone", {"Topic": TOPIC}, kind="CREATE")


def test_a_template_is_read_from_s3_by_any_form_of_its_url(stacks: Any) -> None:
    s3 = stacks.aws.client("s3")
    s3.create_bucket(Bucket="template-store")
    body = '{"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}'
    s3.put_object(Bucket="template-store", Key="a/t.json", Body=body.encode())
    for url in (
        "https://s3.us-east-1.amazonaws.com/template-store/a/t.json",
        "https://template-store.s3.us-east-1.amazonaws.com/a/t.json",
        "https://template-store.s3.amazonaws.com/a/t.json",
        f"{stacks.aws.endpoint}/template-store/a/t.json",
        "s3://template-store/a/t.json",
    ):
        summary = stacks.client.get_template_summary(TemplateURL=url)
        assert summary["ResourceTypes"] == ["AWS::SNS::Topic"]
    with pytest.raises(ClientError, match="S3 error"):
        stacks.client.get_template_summary(TemplateURL="s3://template-store/none.json")
