"""Templates: form, order, YAML."""

import json
from typing import Any

import pytest

from embedded_aws.cloudformation.errors import CloudFormationError
from embedded_aws.cloudformation.intrinsics import Expressions
from embedded_aws.cloudformation.template import parse_template

BUCKET = {"Type": "AWS::S3::Bucket"}


def template_of(resources: dict[str, Any], **sections: Any) -> str:
    return json.dumps({"Resources": resources, **sections})


def test_resources_come_after_what_they_need() -> None:
    body = template_of(
        {
            "C": {**BUCKET, "Properties": {"Tags": [{"Key": "x", "Value": {"Fn::Sub": "${B}"}}]}},
            "B": {**BUCKET, "DependsOn": "A"},
            "A": BUCKET,
            "Off": {**BUCKET, "Condition": "Never"},
        },
        Conditions={"Never": {"Fn::Equals": [1, 2]}},
    )
    template = parse_template(body)
    expressions = Expressions(parameters={}, conditions=template.section("Conditions"))
    assert template.wanted(expressions) == ["A", "B", "C"]


def test_yaml_with_short_tags_keeps_policy_versions_as_text() -> None:
    template = parse_template(
        """
AWSTemplateFormatVersion: 2010-09-09
Resources:
  Policy:
    Type: AWS::S3::BucketPolicy
    Properties:
      Bucket: !Ref Bucket
      PolicyDocument: {Version: 2012-10-17, Statement: [{Resource: !GetAtt Bucket.Arn}]}
  Bucket: {Type: AWS::S3::Bucket, Properties: {BucketName: !Sub "x-${AWS::Region}"}}
"""
    )
    properties = template.resources["Policy"]["Properties"]
    assert properties["Bucket"] == {"Ref": "Bucket"}
    assert properties["PolicyDocument"]["Version"] == "2012-10-17"
    assert properties["PolicyDocument"]["Statement"][0]["Resource"] == {"Fn::GetAtt": "Bucket.Arn"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "Template format error"),
        ("[1]", "unsupported structure"),
        ("{}", "At least one Resources member must be defined"),
        (template_of({"A": BUCKET}, Resource={}), r"properties \[Resource\]"),
        (template_of({"A-b": BUCKET}), "Resource name A-b is non alphanumeric"),
        (template_of({"A": {}}), "must contain a Type member"),
        (template_of({"A": {**BUCKET, "Propertys": {}}}), "resource property 'Propertys'"),
        (template_of({"A": {**BUCKET, "DependsOn": "B"}}), r"dependencies \[B\] in the Resources"),
        (
            template_of({"A": BUCKET}, Outputs={"O": {"Value": {"Ref": "B"}}}),
            r"dependencies \[B\] in the Outputs",
        ),
        (
            template_of({"A": {**BUCKET, "DependsOn": "B"}, "B": {**BUCKET, "DependsOn": ["A"]}}),
            r"Circular dependency between resources: \[A, B\]",
        ),
        (template_of({f"A{i}": BUCKET for i in range(501)}), "501, is greater than maximum"),
        (template_of({"A": BUCKET}, Metadata="x" * 1_000_000), "may not exceed 1000000 bytes"),
        (template_of({"A": BUCKET}, Transform="AWS::Serverless-2016-10-31"), "not run Transforms"),
    ],
)
def test_fails_on_a_malformed_template(body: str, message: str) -> None:
    with pytest.raises(CloudFormationError, match=message):
        parse_template(body)
