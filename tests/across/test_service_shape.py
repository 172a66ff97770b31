"""What a service's model does not allow, told by place, rule, limit and value."""

from typing import Any

import pytest
from botocore.session import get_session

from contract.service_shape import violations


def found(service: str, operation: str, request: dict[str, Any]) -> list[tuple[Any, ...]]:
    shape = get_session().get_service_model(service).operation_model(operation).input_shape
    return [*violations(shape, request)]


@pytest.mark.parametrize(
    ("request_", "rule", "where"),
    [
        ({"Names": [], "WithDecryption": True}, "min", "Names"),
        ({"Names": ["x"] * 11}, "max", "Names"),
        ({"Names": [""]}, "min", "Names[0]"),
        ({}, "missing", "Names"),
        ({"Names": ["x"], "Unknown": 1, "WithDecryption": None}, "", ""),
    ],
)
def test_sizes_and_missing_members_have_their_places(
    request_: dict[str, Any], rule: str, where: str
) -> None:
    said = [(each[1], each[0]) for each in found("ssm", "GetParameters", request_)]
    assert said == ([(rule, where)] if rule else [])


def test_a_map_s_keys_and_values_and_a_name_of_a_list_are_looked_at() -> None:
    request = {
        "TrainingJobName": "a_b",
        "RoleArn": "arn:aws:iam::123456789012:role/Job",
        "OutputDataConfig": {"S3OutputPath": "s3://b/x"},
        "HyperParameters": {"x" * 257: "1", "short": "y" * 2501},
        "ResourceConfig": {"InstanceType": "ml.none"},
    }
    said = {each[:2] for each in found("sagemaker", "CreateTrainingJob", request)}
    assert said == {
        ("TrainingJobName", "pattern"),
        (f"HyperParameters: the name '{'x' * 40}'", "max"),
        ("HyperParameters.short", "max"),
        ("ResourceConfig.InstanceType", "enum"),
    }
