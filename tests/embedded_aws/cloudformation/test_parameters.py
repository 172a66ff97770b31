"""Parameters and rules of templates."""

import json
from typing import Any

import pytest

from embedded_aws.cloudformation.errors import CloudFormationError
from embedded_aws.cloudformation.parameters import Parameter, check_rules, decide_parameters
from embedded_aws.cloudformation.template import Template, parse_template

SSM = {"/ami": "ami-1", "/version": "5"}


def template_with(parameters: dict[str, Any], **sections: Any) -> Template:
    resources = {"Bucket": {"Type": "AWS::S3::Bucket"}}
    return parse_template(
        json.dumps({"Resources": resources, "Parameters": parameters, **sections})
    )


def decide(
    parameters: dict[str, Any],
    given: dict[str, str] | None = None,
    previous: dict[str, Parameter] | None = None,
) -> dict[str, Parameter]:
    return decide_parameters(
        template_with(parameters),
        [{"ParameterKey": key, "ParameterValue": value} for key, value in (given or {}).items()],
        previous=previous or {},
        read_ssm=lambda names: {name: SSM[name] for name in names if name in SSM},
        exists=lambda kind, value: value == "ami-1",
    )


def test_a_default_a_given_value_and_a_list_are_taken() -> None:
    decided = decide(
        {
            "A": {"Type": "String", "Default": "x"},
            "B": {"Type": "Number", "Default": 3},
            "C": {"Type": "CommaDelimitedList"},
        },
        {"A": "given", "C": "1, 2"},
    )
    assert [decided[name].value for name in "ABC"] == ["given", "3", ["1", "2"]]


def test_an_ssm_typed_parameter_has_the_stored_value_and_shows_both() -> None:
    kind = "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>"
    decided = decide({"Ami": {"Type": kind, "Default": "/ami"}})["Ami"]
    assert decided.value == "ami-1"
    assert decided.described("Ami") == {
        "ParameterKey": "Ami",
        "ParameterValue": "/ami",
        "ResolvedValue": "ami-1",
    }


def test_a_secret_is_never_shown() -> None:
    decided = decide({"Key": {"Type": "String", "NoEcho": True}}, {"Key": "hush"})["Key"]
    assert decided.value == "hush"
    assert decided.described("Key")["ParameterValue"] == "****"


def test_the_previous_value_is_kept_on_request() -> None:
    decided = decide_parameters(
        template_with({"A": {"Type": "String", "Default": "new"}}),
        [{"ParameterKey": "A", "UsePreviousValue": True}],
        previous={"A": Parameter(given="old", value="old")},
        read_ssm=lambda names: {},
        exists=lambda kind, value: True,
    )
    assert decided["A"].value == "old"


@pytest.mark.parametrize(
    ("parameter", "given", "message"),
    [
        ({"Type": "String"}, {}, r"Parameters: \[P\] must have values"),
        ({"Type": "String"}, {"Q": "x"}, r"Parameters: \[Q\] do not exist in the template"),
        ({"Type": "String", "AllowedValues": ["a"]}, {"P": "b"}, "must be one of AllowedValues"),
        ({"Type": "String", "AllowedPattern": "[a-z]+"}, {"P": "B"}, "must match pattern"),
        ({"Type": "String", "MinLength": 3}, {"P": "B"}, "must contain at least 3 characters"),
        ({"Type": "String", "MaxLength": "1"}, {"P": "BB"}, "must contain at most 1 characters"),
        ({"Type": "Number"}, {"P": "B"}, "must be a number"),
        ({"Type": "Number", "MinValue": 1}, {"P": "0"}, "must be a number not less than 1"),
        ({"Type": "Number", "MaxValue": 9}, {"P": "10"}, "must be a number not greater than 9"),
        (
            {"Type": "String", "AllowedPattern": "x", "ConstraintDescription": "be x"},
            {"P": "y"},
            "failed to satisfy constraint: be x",
        ),
        (
            {"Type": "AWS::SSM::Parameter::Value<String>"},
            {"P": "/nowhere"},
            r"Unable to fetch parameters \[/nowhere\] from parameter store for this account",
        ),
        ({"Type": "AWS::EC2::Image::Id"}, {"P": "ami-9"}, "parameter value ami-9 .* not exist"),
    ],
)
def test_fails_on_an_impossible_value(
    parameter: dict[str, Any], given: dict[str, str], message: str
) -> None:
    with pytest.raises(CloudFormationError, match=message):
        decide({"P": parameter}, given)


def test_fails_on_a_broken_rule() -> None:
    rule = {
        "Assertions": [
            {
                "Assert": {"Fn::Not": [{"Fn::Contains": [["1", "5"], {"Ref": "Version"}]}]},
                "AssertDescription": "CDK bootstrap stack version 6 required",
            }
        ]
    }
    template = template_with({"Version": {"Type": "String"}}, Rules={"Check": rule})
    check_rules(template, {"Version": "6"})
    with pytest.raises(
        CloudFormationError, match="Check failed: CDK bootstrap stack version 6 required"
    ):
        check_rules(template, {"Version": "5"})
