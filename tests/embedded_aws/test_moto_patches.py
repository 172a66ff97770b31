"""Each patch of moto is needed: without it moto still does the wrong thing.

When one of these fails, moto has learned it: delete the patch.
"""

import base64
import json
from collections.abc import Callable
from functools import partial

import psutil
import pytest
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.s3.models import FakeKey

from embedded_aws import EmbeddedAws
from embedded_aws.moto_patches import PATCHES
from tests.embedded_aws.fleets import Fleets

Without = Callable[..., None]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Without:
    def take_away(*names: str) -> None:
        for patch in PATCHES:
            if patch.name in names:
                monkeypatch.setattr(patch.owner, patch.name, patch.original)

    return take_away


FLEET_PATCHES = [patch.name for patch in PATCHES if "spot_fleet" in patch.name]


def request(fleets: Fleets) -> str:
    """Return a fleet whose template has a second version, which it does not want."""
    fleets.ec2.create_launch_template_version(
        LaunchTemplateId=fleets.template,
        LaunchTemplateData=fleets.data | {"InstanceType": "g5.2xlarge"},
    )
    spec = {"LaunchTemplateId": fleets.template, "Version": "1"}
    configs = [{"LaunchTemplateSpecification": spec}]
    return fleets.request(AllocationStrategy="lowestPrice", LaunchTemplateConfigs=configs)


def test_moto_starts_the_latest_version_whatever_was_asked(
    fleets: Fleets, without: Without
) -> None:
    without(*FLEET_PATCHES)
    ec2, fleet = fleets.ec2, request(fleets)
    (active,) = ec2.describe_spot_fleet_instances(SpotFleetRequestId=fleet)["ActiveInstances"]
    assert active["InstanceType"] == "g5.2xlarge", "version 2, though 1 was asked for"
    found = ec2.describe_instances(InstanceIds=[active["InstanceId"]])
    options = found["Reservations"][0]["Instances"][0]["MetadataOptions"]
    assert options["HttpTokens"] == "optional", "and without the template's MetadataOptions"


def test_moto_cannot_modify_a_fleets_template(fleets: Fleets, without: Without) -> None:
    without(*FLEET_PATCHES)
    ec2, fleet = fleets.ec2, request(fleets)
    with pytest.raises(ResponseParserError, match="500 Internal Server Error"):
        ec2.modify_spot_fleet_request(SpotFleetRequestId=fleet, LaunchTemplateConfigs=[])


def test_moto_forgets_a_cancelled_fleet(fleets: Fleets, without: Without) -> None:
    without(*FLEET_PATCHES)
    ec2, fleet = fleets.ec2, request(fleets)
    ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=True)
    found = ec2.describe_spot_fleet_requests(SpotFleetRequestIds=[fleet])
    assert found["SpotFleetRequestConfigs"] == []


def test_moto_ends_an_instance_at_once_and_deletes_a_group_in_use(
    aws: EmbeddedAws, fleets: Fleets, without: Without
) -> None:
    without("terminate", "delete_security_group")
    fleet = fleets.request()
    (instance,) = (each["InstanceId"] for each in fleets.instances(fleet))
    aws.capacity.powered.add(instance)
    fleets.ec2.terminate_instances(InstanceIds=[instance])
    (found,) = fleets.ec2.describe_instances(InstanceIds=[instance])["Reservations"]
    assert found["Instances"][0]["State"]["Name"] == "terminated"
    aws.power_off(instance)
    fleets.instances(fleets.request())
    fleets.ec2.delete_security_group(GroupId=fleets.group)


def test_moto_makes_a_fleet_at_a_dry_run(fleets: Fleets, without: Without) -> None:
    without("request_spot_fleet")
    specification = {"ImageId": fleets.data["ImageId"], "InstanceType": "g5.xlarge"}
    config = {
        "IamFleetRole": "arn:aws:iam::123456789012:role/fleet",
        "TargetCapacity": 0,
        "AllocationStrategy": "lowestPrice",
        "LaunchSpecifications": [specification],
    }
    made = fleets.ec2.request_spot_fleet(DryRun=True, SpotFleetRequestConfig=config)
    assert made["SpotFleetRequestId"]


def test_moto_finds_nothing_wrong_with_an_unknown_fleet(aws: EmbeddedAws, without: Without) -> None:
    without("describe_spot_fleet_requests")
    found = aws.client("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=["sfr-nowhere"])
    assert found["SpotFleetRequestConfigs"] == []


def test_moto_sends_no_event_of_a_parameter_and_starts_no_spot_machine_in_a_group(
    aws: EmbeddedAws, fleets: Fleets, without: Without
) -> None:
    ssm, given = aws.client("ssm"), {"Name": "/S/fleet-id", "Type": "String", "Overwrite": True}
    ssm.put_parameter(**given, Value="one")
    ssm.put_parameter(**given, Value="two")
    assert [detail["operation"] for _, _, detail, _ in aws.capacity.events] == ["Create", "Update"]
    without("put_parameter", *(patch.name for patch in PATCHES if "auto_scaling" in patch.name))
    ssm.put_parameter(**given, Value="three")
    launch = {"LaunchTemplateSpecification": {"LaunchTemplateId": fleets.template}}
    aws.client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName="g", MinSize=1, MaxSize=1, VPCZoneIdentifier=fleets.subnets[0],
        MixedInstancesPolicy={
            "LaunchTemplate": launch | {"Overrides": [{"InstanceType": "g5.xlarge"}]},
            "InstancesDistribution": {"OnDemandPercentageAboveBaseCapacity": 0},
        },
    )  # fmt: skip
    tag = {"Name": "tag:aws:autoscaling:groupName", "Values": ["g"]}
    (found,) = fleets.ec2.describe_instances(Filters=[tag])["Reservations"]
    assert "InstanceLifecycle" not in found["Instances"][0]
    assert len(aws.capacity.events) == 2


def test_moto_takes_an_unmet_condition_for_a_denial(aws: EmbeddedAws, without: Without) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="denied")
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": "arn:aws:s3:::denied/*",
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    s3.put_bucket_policy(Bucket="denied", Policy=json.dumps(policy))
    s3.put_object(Bucket="denied", Key="k", Body=b"x")
    without("get_permission")
    with pytest.raises(ClientError, match="403"):
        s3.put_object(Bucket="denied", Key="k", Body=b"x")


def test_moto_makes_no_route_for_a_table_that_an_endpoint_gets_later(
    aws: EmbeddedAws, without: Without
) -> None:
    without("modify_vpc_endpoint")
    ec2 = aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    endpoint = ec2.create_vpc_endpoint(
        VpcId=vpc, ServiceName=f"com.amazonaws.{aws.region}.s3", VpcEndpointType="Gateway"
    )["VpcEndpoint"]["VpcEndpointId"]
    ec2.modify_vpc_endpoint(VpcEndpointId=endpoint, AddRouteTableIds=[table])
    with pytest.raises(ClientError, match=r"InvalidRoute\.NotFound"):
        ec2.delete_vpc_endpoints(VpcEndpointIds=[endpoint])


def test_moto_cannot_start_an_instance_from_a_second_version(
    aws: EmbeddedAws, without: Without
) -> None:
    without("create_version")
    ec2 = aws.client("ec2")
    data = {"InstanceType": "g5.xlarge", "UserData": base64.b64encode(b"x").decode()}
    ec2.create_launch_template(LaunchTemplateName="twice", LaunchTemplateData=data)
    ec2.create_launch_template_version(LaunchTemplateName="twice", LaunchTemplateData=data)
    versions = ec2_backends[aws.account][aws.region].get_launch_template_by_name("twice").versions
    assert versions[0].user_data.decode() == "x"
    with pytest.raises(AssertionError):
        _ = versions[1].user_data


def test_moto_wants_a_policy_before_access_logs(aws: EmbeddedAws, without: Without) -> None:
    s3 = aws.client("s3")
    for name in ("logged", "logs"):
        s3.create_bucket(Bucket=name)
    status = {"LoggingEnabled": {"TargetBucket": "logs", "TargetPrefix": "logged/"}}
    s3.put_bucket_logging(Bucket="logged", BucketLoggingStatus=status)
    without("_log_permissions_enabled_policy")
    with pytest.raises(ClientError, match="InvalidTargetBucketForLogging"):
        s3.put_bucket_logging(Bucket="logged", BucketLoggingStatus=status)


def test_moto_reads_the_managed_policies_of_every_partition(
    aws: EmbeddedAws, without: Without
) -> None:
    account = iam_backends[aws.account]
    assert aws.client("sts").get_caller_identity()["Account"] == aws.account
    assert set(account) > {"aws", "aws-cn"}, "a request looks for its key in all of them"
    assert [name for name, each in account.items() if each.aws_managed_policies] == ["aws"]
    without("_init_aws_policies")
    assert account["aws-cn"]._init_aws_policies()


@pytest.mark.parametrize("patched", [True, False])
def test_moto_deletes_and_completes_whatever_the_etag(
    aws: EmbeddedAws, without: Without, patched: bool
) -> None:
    if not patched:
        without("_bucket_response_delete_keys", "_key_response_post")
    s3, bucket = aws.client("s3"), f"etags-{patched}".lower()
    s3.create_bucket(Bucket=bucket)
    right = {key: s3.put_object(Bucket=bucket, Key=key, Body=b"b")["ETag"] for key in ("a", "b&")}
    upload = {"Bucket": bucket, "Key": "a"}
    upload |= {"UploadId": s3.create_multipart_upload(**upload)["UploadId"]}
    part = {"PartNumber": 1, "ETag": s3.upload_part(**upload, PartNumber=1, Body=b"c")["ETag"]}
    complete = partial(s3.complete_multipart_upload, **upload, MultipartUpload={"Parts": [part]})
    if patched:
        with pytest.raises(ClientError, match="PreconditionFailed"):
            complete(IfMatch='"x"')
    complete(IfMatch=right["a"] if patched else '"x"')
    wanted = [{"Key": key, "ETag": right["a"]} for key in ("a", "b&")]
    for some in (wanted[:1], wanted):  # all of them wrong, then one
        answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": some})
        refused = [(each["Key"], each["Code"]) for each in answer.get("Errors", ())]
        assert refused == ([("a", "PreconditionFailed")] if patched else [])
    assert [each["Key"] for each in answer["Deleted"]] == (["b&"] if patched else ["a", "b&"])


def test_every_patch_says_why() -> None:
    assert all(len(patch.replacement.__doc__) > 20 for patch in PATCHES)


def bytes_read_for_ranges(aws: EmbeddedAws, key: str) -> int:
    """What this process reads of files, for ten ranges of an object of 20 MiB."""
    s3 = aws.client("s3")
    s3.create_bucket(Bucket=key)
    s3.put_object(Bucket=key, Key=key, Body=b"old" + bytes(20 * 2**20))
    before = psutil.Process().io_counters().read_chars
    for _ in range(10):
        assert s3.get_object(Bucket=key, Key=key, Range="bytes=0-2")["Body"].read() == b"old"
    read = psutil.Process().io_counters().read_chars - before
    s3.put_object(Bucket=key, Key=key, Body=b"new" + bytes(20 * 2**20))
    assert s3.get_object(Bucket=key, Key=key, Range="bytes=0-2")["Body"].read() == b"new"
    return read


def test_moto_reads_all_of_an_object_for_each_of_its_ranges(
    aws: EmbeddedAws, without: Without
) -> None:
    assert bytes_read_for_ranges(aws, "once") < 2 * 20 * 2**20
    without("value")
    assert bytes_read_for_ranges(aws, "ten-times") > 10 * 20 * 2**20


def test_moto_keeps_a_copy_of_a_bucket_for_each_list_of_its_versions(
    aws: EmbeddedAws, without: Without
) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="listed")
    s3.put_object(Bucket="listed", Key="one", Body=b"1")

    def kept() -> int:
        before = len(FakeKey.instances_tracked)
        (one,) = s3.list_object_versions(Bucket="listed")["Versions"]
        assert (one["Size"], one["IsLatest"]) == (1, True)
        return len(FakeKey.instances_tracked) - before

    assert kept() == 0
    without("__deepcopy__")
    assert kept() > 0


def test_moto_gives_an_endpoint_no_group_and_needs_no_dns(fleets: Fleets, without: Without) -> None:
    ec2 = fleets.ec2
    vpc = ec2.describe_subnets(SubnetIds=fleets.subnets)["Subnets"][0]["VpcId"]
    asked = {
        "VpcId": vpc, "ServiceName": "com.amazonaws.us-east-1.ssm", "SubnetIds": fleets.subnets,
        "VpcEndpointType": "Interface", "PrivateDnsEnabled": True,
    }  # fmt: skip
    with pytest.raises(ClientError, match=r"InvalidParameter.*both enableDnsSupport"):
        ec2.create_vpc_endpoint(**asked)
    without("create_vpc_endpoint")
    assert ec2.create_vpc_endpoint(**asked)["VpcEndpoint"]["Groups"] == []
