"""Every resource type: made, found by its own service's API, changed in place, deleted."""

import io
import json
import threading
import time
import zipfile
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.awslambda_simple.models import lambda_simple_backends

from embedded_aws import Course
from embedded_aws.cloudformation import schema
from embedded_aws.cloudformation.resources import REGISTRY
from tests.embedded_aws.cloudformation.resource_cases import (
    CASES,
    FUNCTION,
    ROLE,
    TOPIC,
    changed,
    group,
    of,
    ref,
    template,
)


def test_every_type_that_can_be_made_has_a_case() -> None:
    assert sorted(CASES) == sorted(REGISTRY)


@pytest.mark.parametrize("type_", sorted(CASES))
def test_a_resource_is_made_changed_and_deleted(stacks: Any, type_: str) -> None:
    resources, change = CASES[type_]
    name = type_.replace("::", "-")
    stack = stacks.create(name, resources)
    assert stack["StackStatus"] == "CREATE_COMPLETE", stacks.reasons(name)
    assert stacks.aws.engine.missing_resources([name]) == []
    made = stacks.aws.engine.find(name).resources["It"]
    assert set(made.attributes) <= schema.attributes_of(type_), "an attribute AWS does not have"
    if change:
        stack = stacks.update(name, {**resources, "It": changed(resources["It"], **change)})
        assert stack["StackStatus"] == "UPDATE_COMPLETE", stacks.reasons(name)
        assert stacks.physical(name, "It") == made.physical_id, "replaced, not changed in place"
        assert stacks.aws.engine.missing_resources([name]) == []
    provisioner = stacks.aws.engine._provisioner(stacks.aws.engine.find(name))
    last = stacks.aws.engine.find(name).resources["It"]
    stacks.delete(name)
    with pytest.raises(ClientError, match="does not exist"):
        stacks.describe(name)
    if type_ != "AWS::CDK::Metadata":
        assert not provisioner.exists(last), "still there after its stack's deletion"


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_new_template_version_reaches_the_fleet_in_place_or_replaces_it(
    stacks: Any, monkeypatch: pytest.MonkeyPatch, is_in_place: bool
) -> None:
    if is_in_place:
        monkeypatch.setattr(schema, "IN_PLACE", {"AWS::EC2::SpotFleet"})
    resources, _ = CASES["AWS::EC2::SpotFleet"]
    name = f"versions-{is_in_place}"
    stacks.create(name, resources)
    before, ec2 = stacks.physical(name, "It"), stacks.aws.client("ec2")

    def seen(fleet: str) -> tuple[str, str, list[Any]]:
        (found,) = ec2.describe_spot_fleet_requests(SpotFleetRequestIds=[fleet])[
            "SpotFleetRequestConfigs"
        ]
        (launch,) = found["SpotFleetRequestConfig"]["LaunchTemplateConfigs"]
        running = ec2.describe_spot_fleet_instances(SpotFleetRequestId=fleet)["ActiveInstances"]
        version = launch["LaunchTemplateSpecification"]["Version"]
        return found["SpotFleetRequestState"], version, running

    _, _, instances = seen(before)
    stacks.update(name, {**resources, "Template": template(InstanceType="g5.2xlarge")})
    after = stacks.physical(name, "It")
    if is_in_place:
        assert after == before
        assert seen(after) == ("active", "2", instances), "running instances are left alone"
    else:
        assert seen(before) == ("cancelled_terminating", "1", [])
        state, version, others = seen(after)
        assert (state, version, len(others), others == instances) == ("active", "2", 1, False)


def test_a_group_is_made_once_it_has_its_machines_and_reset_by_each_change_of_it(
    stacks: Any,
) -> None:
    resources, change = CASES["AWS::AutoScaling::AutoScalingGroup"]
    aws, which = stacks.aws, {"AutoScalingGroupName": "Training-run-1"}
    aws.capacity.follow([Course(steps=((0, 0), (1, 1)))])
    began = time.monotonic()
    stacks.create("group", resources)
    assert time.monotonic() - began > 1, "CloudFormation waits for the desired capacity"
    scaling = aws.client("autoscaling")

    def group() -> dict[str, Any]:
        (found,) = scaling.describe_auto_scaling_groups()["AutoScalingGroups"]
        return dict(found)

    assert group()["EnabledMetrics"][0]["Metric"] == "GroupDesiredCapacity"
    scaling.update_auto_scaling_group(**which, MaxSize=0, DesiredCapacity=0)
    stacks.update("group", {**resources, "Other": CASES["AWS::SSM::Parameter"][0]["It"]})
    assert group()["DesiredCapacity"] == 0, "a deploy that does not change it leaves it alone"
    stacks.update("group", {**resources, "It": changed(resources["It"], **change)})
    assert (group()["MaxSize"], group()["DesiredCapacity"]) == (2, 1)
    assert [tag["Key"] for tag in group()["Tags"]] == ["b"]
    renamed = changed(resources["It"], AutoScalingGroupName="Training-run-2", DesiredCapacity="0")
    stacks.update("group", {**resources, "It": renamed})
    assert stacks.physical("group", "It") == "Training-run-2" == group()["AutoScalingGroupName"]
    instances = [page["Instances"][0] for page in aws.client("ec2").describe_instances(
        Filters=[{"Name": "tag:aws:autoscaling:groupName", "Values": ["Training-run-1"]}]
    )["Reservations"]]  # fmt: skip
    assert {each["State"]["Name"] for each in instances} == {"terminated"}
    aws.capacity.reset()


def test_a_security_group_and_what_it_needs_stay_while_an_instance_shuts_down(stacks: Any) -> None:
    group = {**CASES["AWS::EC2::SecurityGroup"][0]["It"], "DependsOn": ["Kept"]}
    kept, (subnet, _) = CASES["AWS::SSM::Parameter"][0]["It"], CASES["AWS::EC2::Subnet"]
    stacks.create("shut-down", {"Vpc": subnet["Vpc"], "S": subnet["It"], "Kept": kept, "It": group})
    aws, parameter = stacks.aws, stacks.physical("shut-down", "Kept")
    ec2, ssm = aws.client("ec2"), aws.client("ssm")
    ran = ec2.run_instances(
        ImageId="ami-0123456789abcdef0", MinCount=1, MaxCount=1,
        SubnetId=stacks.physical("shut-down", "S"),
        SecurityGroupIds=[stacks.physical("shut-down", "It")],
    )  # fmt: skip
    instance = ran["Instances"][0]["InstanceId"]
    aws.capacity.powered.add(instance)
    ec2.terminate_instances(InstanceIds=[instance])
    seen = []

    def state() -> str:
        found = ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
        return str(found["State"]["Name"])

    def power_off() -> None:
        seen.append((state(), ssm.get_parameter(Name=parameter)["Parameter"]["Name"]))
        aws.power_off(instance)

    timer = threading.Timer(1.0, power_off)
    timer.start()
    stacks.delete("shut-down")
    timer.join()
    assert (seen, state()) == ([("shutting-down", parameter)], "terminated")
    with pytest.raises(ClientError, match="ParameterNotFound"):
        ssm.get_parameter(Name=parameter)


def test_fails_on_a_fleet_that_wants_the_latest_version(stacks: Any) -> None:
    resources = json.loads(json.dumps(CASES["AWS::EC2::SpotFleet"][0]))
    data = resources["It"]["Properties"]["SpotFleetRequestConfigData"]
    data["LaunchTemplateConfigs"][0]["LaunchTemplateSpecification"]["Version"] = "$Latest"
    assert stacks.create("latest", resources)["StackStatus"] == "ROLLBACK_COMPLETE"
    assert any("must be a number" in reason for reason in stacks.reasons("latest"))


def test_fails_on_a_fleet_role_that_does_not_trust_spot_fleets(stacks: Any) -> None:
    resources = json.loads(json.dumps(CASES["AWS::EC2::SpotFleet"][0]))
    statement = resources["Role"]["Properties"]["AssumeRolePolicyDocument"]["Statement"][0]
    statement["Principal"] = {"Service": "ec2.amazonaws.com"}
    assert stacks.create("distrusted", resources)["StackStatus"] == "ROLLBACK_COMPLETE"
    assert any("IamFleetRole is invalid" in reason for reason in stacks.reasons("distrusted"))


def test_fails_on_a_rule_description_that_ec2_does_not_take(stacks: Any) -> None:
    resources, _ = CASES["AWS::EC2::SecurityGroup"]
    rule = {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0", "Description": "a > b"}
    wanted = {**resources, "It": changed(resources["It"], SecurityGroupEgress=[rule])}
    assert stacks.create("described", wanted)["StackStatus"] == "ROLLBACK_COMPLETE"
    assert any("Invalid rule description" in reason for reason in stacks.reasons("described"))


def test_fails_on_user_data_above_16_kb(stacks: Any) -> None:
    large = template(UserData={"Fn::Base64": "x" * 17000})
    assert stacks.create("large", {"It": large})["StackStatus"] == "ROLLBACK_COMPLETE"
    assert any("limited to 16384 bytes" in reason for reason in stacks.reasons("large"))


def test_the_code_of_a_function_is_fetched_from_s3(stacks: Any) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("handler.py", "def handler(event, context): return event")
    s3 = stacks.aws.client("s3")
    s3.create_bucket(Bucket="function-code")
    s3.put_object(Bucket="function-code", Key="code.zip", Body=packed.getvalue())
    code = {"S3Bucket": "function-code", "S3Key": "code.zip"}
    stacks.create("coded", {"Role": ROLE, "It": changed(FUNCTION, Code=code)})
    client = stacks.aws.client("lambda")
    found = client.get_function(FunctionName=stacks.physical("coded", "It"))
    assert found["Configuration"]["Handler"] == "index.handler"
    assert found["Configuration"]["CodeSize"] == len(packed.getvalue())
    function = lambda_simple_backends[stacks.aws.account][stacks.aws.region].get_function(
        stacks.physical("coded", "It")
    )
    assert function.code_bytes == packed.getvalue()


def test_a_boundary_of_a_role_is_added_and_removed(stacks: Any) -> None:
    arn, iam = "arn:aws:iam::aws:policy/ReadOnlyAccess", stacks.aws.client("iam")
    stacks.create("bound", {"Role": ROLE})
    name = stacks.physical("bound", "Role")
    for role in (changed(ROLE, PermissionsBoundary=arn), ROLE):
        stacks.update("bound", {"Role": role})
        found = iam.get_role(RoleName=name)["Role"].get("PermissionsBoundary", {})
        wanted = role["Properties"].get("PermissionsBoundary")
        assert found.get("PermissionsBoundaryArn") == wanted


def test_a_key_is_disabled_and_enabled(stacks: Any) -> None:
    kms, key = stacks.aws.client("kms"), of("KMS::Key")
    stacks.create("key", {"Key": changed(key, Enabled=False)})
    name = stacks.physical("key", "Key")
    assert kms.describe_key(KeyId=name)["KeyMetadata"]["KeyState"] == "Disabled"
    stacks.update("key", {"Key": key})
    assert kms.describe_key(KeyId=name)["KeyMetadata"]["KeyState"] == "Enabled"


def test_the_tags_of_a_launch_template_follow_its_updates(stacks: Any) -> None:
    ec2, made = stacks.aws.client("ec2"), template(InstanceType="g5.xlarge")
    for create, tags in (
        (stacks.create, {"Run": "1", "Owner": "me"}),
        (stacks.update, {"Run": "2"}),
        (stacks.update, {}),
    ):
        given = [{"Key": key, "Value": value} for key, value in tags.items()]
        of_it = [{"ResourceType": "launch-template", "Tags": given}]
        create("tagged", {"It": changed(made, TagSpecifications=of_it)})
        of = {"Name": "resource-id", "Values": [stacks.physical("tagged", "It")]}
        found = ec2.describe_tags(Filters=[of])["Tags"]
        assert {each["Key"]: each["Value"] for each in found} == tags


@pytest.mark.parametrize(
    ("resource", "change"),
    [
        (group(), {"LogGroupClass": "INFREQUENT_ACCESS"}),
        (group(), {"KmsKeyId": "arn:aws:kms:us-east-1:123456789012:key/" + "0" * 36}),
    ],
)
def test_fails_a_change_in_place_that_nothing_here_makes(
    stacks: Any, resource: dict[str, Any], change: dict[str, Any]
) -> None:
    name = f"fixed-{next(iter(change))}"
    stacks.create(name, {"It": resource})
    stack = stacks.update(name, {"It": changed(resource, **change)})
    assert stack["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    assert f"cannot update {next(iter(change))} of" in "\n".join(stacks.reasons(name))


def test_fails_a_target_whose_input_no_event_would_have(stacks: Any) -> None:
    target = {"Id": "1", "Arn": ref("Topic"), "InputPath": "$.detail"}
    rule = of("Events::Rule", EventPattern={"source": ["a"]}, Targets=[target])
    stacks.create("input", {"Topic": TOPIC, "Rule": rule})
    assert "cannot set InputPath of a target" in "\n".join(stacks.reasons("input"))
