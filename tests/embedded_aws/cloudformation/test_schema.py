"""What the resource schemas say."""

from typing import Any

import pytest

from embedded_aws.cloudformation import schema
from embedded_aws.cloudformation.intrinsics import Unknown

FLEET = {"IamFleetRole": "arn:aws:iam::123456789012:role/fleet", "TargetCapacity": 1}


def fleet(**changes: Any) -> dict[str, Any]:
    return {"SpotFleetRequestConfigData": FLEET | changes}


def test_scalars_become_what_the_schema_wants() -> None:
    made = schema.coerce("AWS::EC2::SpotFleet", fleet(TargetCapacity="2", Type="maintain"))
    assert made["SpotFleetRequestConfigData"]["TargetCapacity"] == 2
    made = schema.coerce("AWS::EC2::VPC", {"EnableDnsSupport": "true", "CidrBlock": 10})
    assert made == {"EnableDnsSupport": True, "CidrBlock": "10"}
    assert schema.coerce("AWS::SSM::Parameter", {"Tags": {"a": 1}}) == {"Tags": {"a": "1"}}


@pytest.mark.parametrize(
    ("type_", "properties", "problem"),
    [
        ("AWS::S3::Bucket", {"Colour": 1}, "#: extraneous key [Colour] is not permitted"),
        ("AWS::Logs::LogGroup", {"RetentionInDays": 8}, "#/RetentionInDays: 8 is not a valid enum"),
        ("AWS::EC2::SpotFleet", {}, "#: required key [SpotFleetRequestConfigData] not found"),
        (
            "AWS::EC2::SpotFleet",
            fleet(TargetCapacity="many"),
            "#/SpotFleetRequestConfigData/TargetCapacity: expected type: Integer, found: String",
        ),
        (
            "AWS::EC2::SpotFleet",
            fleet(Type="forever", Extra=1),
            "#/SpotFleetRequestConfigData: extraneous key [Extra] is not permitted",
        ),
        ("AWS::S3::Bucket", {"BucketName": "No_Way"}, "#/BucketName: failed validation"),
    ],
)
def test_fails_on_properties_that_break_the_schema(
    type_: str, properties: dict[str, Any], problem: str
) -> None:
    found = schema.problems(type_, properties)
    assert any(item.startswith(problem) for item in found), found


def test_a_value_still_to_come_is_not_judged() -> None:
    assert schema.problems("AWS::EC2::SpotFleet", fleet(IamFleetRole=Unknown("role"))) == []
    assert schema.problems("AWS::Logs::LogGroup", {"RetentionInDays": Unknown("days")}) == []


def test_what_replaces_follows_the_create_only_paths() -> None:
    type_ = "AWS::EC2::SpotFleet"
    assert not schema.replacing_paths(type_, fleet(), fleet(TargetCapacity=2))
    assert schema.replacing_paths(type_, fleet(), fleet(AllocationStrategy="diversified"))
    changed = schema.changed_properties(type_, fleet(), fleet(AllocationStrategy=Unknown("x")))
    assert changed == [("SpotFleetRequestConfigData", "Conditionally")]


def test_types_and_attributes_that_aws_does_not_know() -> None:
    assert schema.schema_of("AWS::EC2::Nonsense") is None
    assert "LatestVersionNumber" in schema.attributes_of("AWS::EC2::LaunchTemplate")
    assert "Colour" not in schema.attributes_of("AWS::S3::Bucket")
