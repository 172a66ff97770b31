"""Valid templates that CloudFormation would not deploy over what is there."""

from collections.abc import Mapping
from typing import Any

import pytest

from review.assembly import Side, StackSide
from review.comment import write_comment
from review.verdict import judge


def side(**templates: Mapping[str, Any]) -> Side:
    return Side(name="side", stacks={name: StackSide(template=each)
                                     for name, each in templates.items()})  # fmt: skip


def stack(resources: Mapping[str, Any], outputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"Resources": resources, "Outputs": outputs or {}}


def parameter(name: str, tier: str = "Standard") -> dict[str, Any]:
    return {"Type": "AWS::SSM::Parameter",
            "Properties": {"Name": name, "Type": "String", "Value": "x", "Tier": tier}}  # fmt: skip


def group(name: str | None = None) -> dict[str, Any]:
    properties = {"LogGroupName": name} if name else {}
    return {"Type": "AWS::Logs::LogGroup", "Properties": properties}


def test_a_name_cannot_move_to_another_logical_id() -> None:
    base, head = side(S=stack({"Old": group("/logs")})), side(S=stack({"New": group("/logs")}))
    (refusal,) = judge(base, head, []).of("refused")
    assert "the name /logs still belongs to Old" in refusal.what
    assert "### A deploy would fail" in write_comment(judge(base, head, []))


def test_names_that_cloudformation_makes_may_move() -> None:
    base, head = side(S=stack({"Old": group()})), side(S=stack({"New": group()}))
    assert judge(base, head, []).of("refused") == []


def test_a_named_resource_cannot_be_replaced_under_its_name() -> None:
    old = {"Type": "AWS::Lambda::Function",
           "Properties": {"FunctionName": "guard", "PackageType": "Zip"}}  # fmt: skip
    new = {**old, "Properties": {"FunctionName": "guard", "PackageType": "Image"}}
    (refusal,) = judge(side(S=stack({"F": old})), side(S=stack({"F": new})), []).of("refused")
    assert "the template names it guard" in refusal.what


def test_a_resource_cannot_become_another_type() -> None:
    base, head = side(S=stack({"It": group()})), side(S=stack({"It": parameter("/it")}))
    (refusal,) = judge(base, head, []).of("refused")
    assert "AWS::Logs::LogGroup → AWS::SSM::Parameter" in refusal.what


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_export_in_use_cannot_go(is_kept: bool) -> None:
    output = {"Name": {"Value": "x", "Export": {"Name": "Data:Name"}}}
    user = stack(
        {"P": parameter("/p") | {"Properties": {"Value": {"Fn::ImportValue": "Data:Name"}}}}
    )
    base = side(Data=stack({}, output), User=user)
    head = side(Data=stack({}, output if is_kept else {}), User=stack({"P": parameter("/p")}))
    whats = [
        refusal.what for refusal in judge(base, head, []).of("refused") if refusal.stack == "Data"
    ]
    assert whats == ([] if is_kept else ["the export is removed while User imports it"])
