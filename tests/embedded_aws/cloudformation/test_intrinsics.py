"""Expressions of templates."""

from typing import Any

import pytest

from embedded_aws.cloudformation.errors import CloudFormationError
from embedded_aws.cloudformation.intrinsics import Expressions, Unknown, has_unknown

PARAMETERS = {"Name": "runs", "Zones": ["a", "b"], "AWS::Region": "us-east-1", "Env": "prod"}


def expressions(**more: Any) -> Expressions:
    return Expressions(
        parameters=PARAMETERS,
        mappings={"Sizes": {"us-east-1": {"Size": "g5.xlarge"}}},
        conditions={"IsProd": {"Fn::Equals": [{"Ref": "Env"}, "prod"]}},
        zones=lambda: ["us-east-1a", "us-east-1b"],
        **more,
    )


@pytest.mark.parametrize(
    ("node", "value"),
    [
        ({"Ref": "Name"}, "runs"),
        ({"Fn::Join": ["-", ["a", {"Ref": "Name"}, 3]]}, "a-runs-3"),
        ({"Fn::Sub": "${Name} ${!Literal} ${AWS::Region}"}, "runs ${Literal} us-east-1"),
        ({"Fn::Sub": ["${x}/${Name}", {"x": {"Ref": "Env"}}]}, "prod/runs"),
        ({"Fn::Select": [1, {"Ref": "Zones"}]}, "b"),
        ({"Fn::Select": ["0", {"Fn::GetAZs": ""}]}, "us-east-1a"),
        ({"Fn::Split": ["-", "us-east-1"]}, ["us", "east", "1"]),
        ({"Fn::If": ["IsProd", 1, 2]}, 1),
        ({"Fn::FindInMap": ["Sizes", {"Ref": "AWS::Region"}, "Size"]}, "g5.xlarge"),
        ({"Fn::Base64": "hello"}, "aGVsbG8="),
        ({"Fn::Cidr": ["10.0.0.0/16", 2, 8]}, ["10.0.0.0/24", "10.0.1.0/24"]),
        ({"Fn::And": [{"Condition": "IsProd"}, {"Fn::Not": [{"Fn::Equals": [1, 2]}]}]}, True),
        ({"Fn::Or": [{"Fn::Equals": ["true", True]}, False]}, True),
        ({"a": {"Ref": "AWS::NoValue"}, "b": [{"Ref": "AWS::NoValue"}, 1]}, {"b": [1]}),
        ({"Condition": {"Bool": {"x": "y"}}}, {"Condition": {"Bool": {"x": "y"}}}),
    ],
)
def test_expressions_are_evaluated_as_cloudformation_does(node: Any, value: Any) -> None:
    assert expressions().value(node) == value


def test_a_value_that_waits_for_a_resource_makes_everything_made_of_it_wait() -> None:
    waiting = expressions(
        reference=lambda name: Unknown(name), attribute=lambda name, key: Unknown(f"{name}.{key}")
    )
    for node in (
        {"Ref": "Bucket"},
        {"Fn::GetAtt": ["Bucket", "Arn"]},
        {"Fn::Join": ["", ["arn:", {"Ref": "Bucket"}]]},
        {"Fn::Sub": "s3://${Bucket}/x"},
        {"Fn::Base64": {"Fn::Sub": "${Bucket.Arn}"}},
        {"Fn::Select": [0, {"Fn::Split": [":", {"Ref": "Bucket"}]}]},
    ):
        assert isinstance(waiting.value(node), Unknown), node
    assert has_unknown(waiting.value({"a": [{"b": {"Ref": "Bucket"}}]}))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"Fn::Select": [5, ["a"]]}, "nonexistent value at index 5"),
        ({"Fn::FindInMap": ["Sizes", "eu", "Size"]}, "Unable to get mapping for Sizes::eu::Size"),
        ({"Fn::Nonsense": 1}, "unsupported intrinsic function Fn::Nonsense"),
        ("{{resolve:ssm:/x}}", "unresolved reference to ssm:/x"),
        ({"Fn::If": ["Nowhere", 1, 2]}, "Unresolved condition dependency Nowhere"),
    ],
)
def test_fails_on_what_cannot_be_evaluated(node: Any, message: str) -> None:
    with pytest.raises(CloudFormationError, match=message.replace("(", r"\(")):
        expressions().value(node)
