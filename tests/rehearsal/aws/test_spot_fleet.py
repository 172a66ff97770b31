"""Spot fleets from launch templates: they start, follow their target, and take new versions."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from rehearsal.aws import EmbeddedAws

ROLE = "arn:aws:iam::123456789012:role/fleet"
RUNNING = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]


class Fleets:
    """A network, a launch template and the fleets of one test."""

    def __init__(self, aws: EmbeddedAws) -> None:
        self.ec2 = aws.client("ec2")
        vpc = self.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        self.subnets = [
            self.ec2.create_subnet(
                VpcId=vpc, CidrBlock=f"10.0.{index}.0/24", AvailabilityZone=f"{aws.region}{zone}"
            )["Subnet"]["SubnetId"]
            for index, zone in enumerate("ab")
        ]
        self.ec2.modify_subnet_attribute(
            SubnetId=self.subnets[0], MapPublicIpOnLaunch={"Value": True}
        )
        self.group = self.ec2.create_security_group(
            GroupName=f"g-{vpc}", Description="d", VpcId=vpc
        )["GroupId"]
        image = self.ec2.describe_images(Owners=["self"])["Images"][0]["ImageId"]
        self.data = {
            "ImageId": image,
            "InstanceType": "g5.xlarge",
            "SecurityGroupIds": [self.group],
            "UserData": base64.b64encode(b"#!/bin/bash\necho one\n").decode(),
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "BlockDeviceMappings": [
                {"DeviceName": "sdf", "Ebs": {"VolumeSize": 200, "DeleteOnTermination": True}}
            ],
            "TagSpecifications": [
                {"ResourceType": "instance", "Tags": [{"Key": "Stack", "Value": "S"}]},
                {"ResourceType": "volume", "Tags": [{"Key": "Stack", "Value": "S"}]},
            ],
        }
        self.template = self.ec2.create_launch_template(
            LaunchTemplateName=f"t-{vpc}", LaunchTemplateData=self.data
        )["LaunchTemplate"]["LaunchTemplateId"]

    def configs(self, version: str = "1", size: str = "g5.2xlarge") -> list[dict[str, Any]]:
        overrides = [{"InstanceType": size, "SubnetId": subnet} for subnet in self.subnets]
        spec = {"LaunchTemplateId": self.template, "Version": version}
        return [{"LaunchTemplateSpecification": spec, "Overrides": overrides}]

    def request(self, target: int = 1, **more: Any) -> str:
        config = {
            "IamFleetRole": ROLE,
            "TargetCapacity": target,
            "Type": "maintain",
            "AllocationStrategy": "priceCapacityOptimized",
            "LaunchTemplateConfigs": self.configs(),
            **more,
        }
        made = self.ec2.request_spot_fleet(SpotFleetRequestConfig=config)
        return str(made["SpotFleetRequestId"])

    def modify(self, fleet: str, **changes: Any) -> None:
        self.ec2.modify_spot_fleet_request(SpotFleetRequestId=fleet, **changes)

    def instances(self, fleet: str) -> list[dict[str, Any]]:
        tag = {"Name": "tag:aws:ec2spot:fleet-request-id", "Values": [fleet]}
        found = self.ec2.describe_instances(Filters=[tag, *RUNNING])["Reservations"]
        running = [item for reservation in found for item in reservation["Instances"]]
        listed = self.ec2.describe_spot_fleet_instances(SpotFleetRequestId=fleet)
        ids = {item["InstanceId"] for item in listed["ActiveInstances"]}
        assert {item["InstanceId"] for item in running} == ids
        return running

    def user_data(self, instance: dict[str, Any]) -> bytes:
        found = self.ec2.describe_instance_attribute(
            InstanceId=instance["InstanceId"], Attribute="userData"
        )
        return base64.b64decode(found["UserData"]["Value"])


@pytest.fixture
def fleets(aws: EmbeddedAws) -> Iterator[Fleets]:
    yield Fleets(aws)


def test_an_instance_starts_from_its_template_and_the_first_override(fleets: Fleets) -> None:
    (instance,) = fleets.instances(fleets.request())
    assert instance["InstanceType"] == "g5.2xlarge"
    assert instance["InstanceLifecycle"] == "spot"
    assert instance["SubnetId"] == fleets.subnets[0]
    assert instance["Placement"]["AvailabilityZone"].endswith("a")
    assert instance["ImageId"] == fleets.data["ImageId"]
    assert instance["MetadataOptions"]["HttpTokens"] == "required"
    assert [item["GroupId"] for item in instance["SecurityGroups"]] == [fleets.group]
    assert instance["PublicIpAddress"], "the subnet gives public addresses"
    assert {"Key": "Stack", "Value": "S"} in instance["Tags"]
    assert fleets.user_data(instance) == b"#!/bin/bash\necho one\n"
    volumes = fleets.ec2.describe_volumes(
        Filters=[{"Name": "attachment.instance-id", "Values": [instance["InstanceId"]]}]
    )["Volumes"]
    assert 200 in [item["Size"] for item in volumes]
    assert all(item["Tags"] == [{"Key": "Stack", "Value": "S"}] for item in volumes)


def test_asking_for_the_same_target_replaces_what_was_lost(fleets: Fleets) -> None:
    fleet = fleets.request()
    (lost,) = fleets.instances(fleet)
    fleets.ec2.terminate_instances(InstanceIds=[lost["InstanceId"]])
    assert fleets.instances(fleet) == []
    fleets.modify(fleet, TargetCapacity=1)
    (found,) = fleets.instances(fleet)
    assert found["InstanceId"] != lost["InstanceId"]
    fleets.modify(fleet, TargetCapacity=1)
    assert fleets.instances(fleet)[0]["InstanceId"] == found["InstanceId"]


def test_the_target_is_followed_up_and_down_to_zero(fleets: Fleets) -> None:
    fleet = fleets.request()
    for target in (3, 2, 0, 1, 0):
        fleets.modify(fleet, TargetCapacity=target, OnDemandTargetCapacity=0)
        assert len(fleets.instances(fleet)) == target
    found = fleets.ec2.describe_spot_fleet_requests(SpotFleetRequestIds=[fleet])
    described = found["SpotFleetRequestConfigs"][0]
    assert described["SpotFleetRequestConfig"]["TargetCapacity"] == 0
    assert described["SpotFleetRequestState"] == "active"


def test_a_base_of_on_demand_capacity_is_kept(fleets: Fleets) -> None:
    fleet = fleets.request(target=3, OnDemandTargetCapacity=1)
    lifecycles = [item.get("InstanceLifecycle") for item in fleets.instances(fleet)]
    assert sorted(map(str, lifecycles)) == ["None", "spot", "spot"]
    fleets.modify(fleet, TargetCapacity=0, OnDemandTargetCapacity=0)
    assert fleets.instances(fleet) == []


def test_a_new_template_version_is_for_later_instances(fleets: Fleets) -> None:
    fleet = fleets.request()
    (before,) = fleets.instances(fleet)
    data = fleets.data | {"UserData": base64.b64encode(b"two").decode()}
    fleets.ec2.create_launch_template_version(
        LaunchTemplateId=fleets.template, LaunchTemplateData=data
    )
    fleets.modify(fleet, LaunchTemplateConfigs=fleets.configs("2", "g5.4xlarge"))
    assert fleets.instances(fleet)[0]["InstanceId"] == before["InstanceId"]
    fleets.ec2.terminate_instances(InstanceIds=[before["InstanceId"]])
    fleets.modify(fleet, TargetCapacity=1)
    (after,) = fleets.instances(fleet)
    assert after["InstanceType"] == "g5.4xlarge"
    assert fleets.user_data(after) == b"two"


def test_a_cancelled_fleet_ends_its_instances_and_starts_none(fleets: Fleets) -> None:
    fleet = fleets.request(target=2)
    fleets.ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=True)
    assert fleets.instances(fleet) == []
    with pytest.raises(ClientError, match="is in state cancelled_terminating"):
        fleets.modify(fleet, TargetCapacity=1)


def test_fails_on_an_unknown_fleet_and_on_an_impossible_base(fleets: Fleets) -> None:
    with pytest.raises(ClientError, match=r"InvalidSpotFleetRequestId\.NotFound"):
        fleets.modify("sfr-nowhere", TargetCapacity=1)
    with pytest.raises(ClientError, match=r"InvalidSpotFleetRequestId\.NotFound"):
        fleets.ec2.describe_spot_fleet_requests(SpotFleetRequestIds=["sfr-nowhere"])
    with pytest.raises(ClientError, match="OnDemandTargetCapacity 2 is above TargetCapacity 1"):
        fleets.modify(fleets.request(), TargetCapacity=1, OnDemandTargetCapacity=2)
