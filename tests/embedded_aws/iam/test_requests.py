"""Requests in IAM's words: actions, resources and condition keys."""

import json
from typing import Any
from urllib.parse import urlencode

import boto3
import pytest
from botocore.serialize import create_serializer

from embedded_aws.iam.requests import asked

WHERE = ("us-east-1", "123456789012")
EC2 = "arn:aws:ec2:us-east-1:123456789012"


def form(service: str, **values: Any) -> Any:
    given = {name.replace("_", "."): value for name, value in values.items()}
    return asked(service, {}, urlencode(given).encode(), WHERE)


def test_each_instance_of_a_call_is_asked_for() -> None:
    found = form("ec2", Action="TerminateInstances", InstanceId_1="i-1", InstanceId_2="i-2")
    assert [one.resource for one in found] == [f"{EC2}:instance/i-1", f"{EC2}:instance/i-2"]


def test_a_change_of_a_fleet_has_its_new_values_as_keys() -> None:
    (one,) = form(
        "ec2", Action="ModifySpotFleetRequest", SpotFleetRequestId="sfr-1", TargetCapacity=0
    )
    assert one.resource == f"{EC2}:spot-fleet-request/sfr-1"
    assert one.keys["ec2:attribute/targetcapacity"] == "0"


def test_a_change_of_a_fleets_pools_asks_for_its_template_and_subnets() -> None:
    specification = {"LaunchTemplateId": "lt-1", "Version": "1"}
    pools = [{"SubnetId": "subnet-1"}, {"SubnetId": "subnet-2"}]
    client = boto3.client("ec2", region_name="us-east-1")
    model = client.meta.service_model.operation_model("ModifySpotFleetRequest")
    config = {"LaunchTemplateSpecification": specification, "Overrides": pools}
    given = {"SpotFleetRequestId": "sfr-1", "LaunchTemplateConfigs": [config]}
    sent = create_serializer("ec2").serialize_to_request(given, model)["body"]
    found = asked("ec2", {}, urlencode(sent).encode(), WHERE)
    assert {one.resource for one in found} == {
        f"{EC2}:spot-fleet-request/sfr-1",
        f"{EC2}:launch-template/lt-1",
        f"{EC2}:subnet/subnet-1",
        f"{EC2}:subnet/subnet-2",
    }


def test_new_tags_are_keys_of_the_request() -> None:
    (one,) = form(
        "ec2", Action="CreateTags", ResourceId_1="vol-1", Tag_1_Key="Stack", Tag_1_Value="T"
    )
    assert (one.keys["aws:requesttag/stack"], one.keys["aws:tagkeys"]) == ("T", ("Stack",))


def test_a_role_that_is_passed_on_is_asked_for_too() -> None:
    role = "arn:aws:iam::123456789012:role/cfn"
    stack, passed = form("cloudformation", Action="CreateStack", StackName="S", RoleARN=role)
    assert stack.resource.endswith(":stack/S/new")
    assert (passed.action, passed.resource) == ("iam:PassRole", role)
    assert passed.keys == {"iam:passedtoservice": "cloudformation.amazonaws.com"}


def test_roles_of_flow_logs_functions_and_training_jobs_are_passed_on() -> None:
    role = "arn:aws:iam::123456789012:role/r"
    path = "/2015-03-31/functions/Guard/configuration"
    put = {"REQUEST_METHOD": "PUT", "PATH_INFO": path, "RAW_URI": path}
    job = {"HTTP_X_AMZ_TARGET": "SageMaker.CreateTrainingJob"}
    for service, found in {
        "vpc-flow-logs": form("ec2", Action="CreateFlowLogs", DeliverLogsPermissionArn=role),
        "lambda": asked("lambda", put, json.dumps({"Role": role}).encode(), WHERE),
        "sagemaker": asked("sagemaker", job, json.dumps({"RoleArn": role}).encode(), WHERE),
    }.items():
        assert (found[-1].action, found[-1].resource) == ("iam:PassRole", role)
        assert found[-1].keys == {"iam:passedtoservice": f"{service}.amazonaws.com"}
    kept = asked("lambda", put, json.dumps({"Timeout": 60}).encode(), WHERE)
    assert [each.action for each in kept] == ["lambda:UpdateFunctionConfiguration"]


def test_json_and_rest_services_name_their_actions_too() -> None:
    target = {"HTTP_X_AMZ_TARGET": "AmazonSSM.GetParameter"}
    (one,) = asked("ssm", target, json.dumps({"Name": "/a/b"}).encode(), WHERE)
    assert one.resource == "arn:aws:ssm:us-east-1:123456789012:parameter/a/b"
    path = "/2015-03-31/functions/Guard/configuration"
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "RAW_URI": path}
    (one,) = asked("lambda", environ, b"", WHERE)
    assert (one.action, one.resource.rpartition(":")[2]) == (
        "lambda:GetFunctionConfiguration",
        "Guard",
    )


@pytest.mark.parametrize(
    ("method", "path", "query", "action"),
    [
        ("GET", "/bucket/a/b", "", "s3:GetObject"),
        ("HEAD", "/bucket/a/b", "", "s3:GetObject"),
        ("GET", "/bucket", "list-type=2&prefix=a", "s3:ListBucket"),
        ("PUT", "/bucket/a/b", "partNumber=1&uploadId=x", "s3:PutObject"),
        ("POST", "/bucket/a/b", "uploads", "s3:PutObject"),
        ("POST", "/bucket", "delete", "s3:DeleteObject"),
        ("GET", "/bucket", "versions", "s3:ListBucketVersions"),
        ("GET", "/bucket/a/b", "versionId=1", "s3:GetObjectVersion"),
        ("GET", "/bucket", "encryption", "s3:GetEncryptionConfiguration"),
        ("PUT", "/bucket", "policy", "s3:PutBucketPolicy"),
        ("PUT", "/bucket", "publicAccessBlock", "s3:PutBucketPublicAccessBlock"),
        ("DELETE", "/bucket/a/b", "", "s3:DeleteObject"),
        ("DELETE", "/bucket/a/b", "uploadId=x", "s3:AbortMultipartUpload"),
    ],
)
def test_a_request_to_s3_is_named_as_iam_names_it(
    method: str, path: str, query: str, action: str
) -> None:
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    body = b"<Delete><Object><Key>a/b</Key></Object></Delete>" if query == "delete" else b""
    (one,) = asked("s3", environ, body, WHERE)
    is_object = "/a/b" in path or query == "delete"
    assert (one.action, one.resource) == (action, f"arn:aws:s3:::bucket{'/a/b' * is_object}")


def test_a_change_of_a_group_has_its_sizes_as_keys_and_a_template_needs_to_start_it() -> None:
    name = {"AutoScalingGroupName": "S-run"}
    (one,) = form("autoscaling", Action="UpdateAutoScalingGroup", **name, MaxSize=0, MinSize=0)
    assert one.resource.endswith(":autoScalingGroup:*:autoScalingGroupName/S-run")
    assert one.keys == {"autoscaling:maxsize": "0", "autoscaling:minsize": "0"}
    (one,) = form("autoscaling", Action="DescribeScalingActivities", **name)
    assert one.resource == "*", "AWS lets nobody limit what is described"
    spec = "MixedInstancesPolicy_LaunchTemplate_LaunchTemplateSpecification_LaunchTemplateId"
    _, more = form("autoscaling", Action="UpdateAutoScalingGroup", **name, **{spec: "lt-1"})
    assert (more.action, more.resource) == ("ec2:RunInstances", f"{EC2}:instance/*")
