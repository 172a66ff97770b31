"""Spot fleets from launch templates: they start, follow their target, and take new versions."""

import base64

import pytest
from botocore.exceptions import ClientError

from tests.embedded_aws.fleets import Fleets


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


def test_a_template_that_run_instances_would_refuse_starts_nothing(fleets: Fleets) -> None:
    for version, iops in (("2", 16_000), ("3", 5000)):
        ebs = {"VolumeType": "gp3", "VolumeSize": 10, "Iops": iops}
        fleets.ec2.create_launch_template_version(
            LaunchTemplateId=fleets.template,
            LaunchTemplateData=fleets.data
            | {"BlockDeviceMappings": [{"DeviceName": "sdf", "Ebs": ebs}]},
        )
        fleet = fleets.request(LaunchTemplateConfigs=fleets.configs(version))
        assert bool(fleets.instances(fleet)) is (iops == 5000)


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
    with pytest.raises(ClientError, match=r"\(FleetNotInModifiableState\).*cancelled_terminating"):
        fleets.modify(fleet, TargetCapacity=1)


def test_fails_on_an_unknown_fleet_and_on_an_impossible_base(fleets: Fleets) -> None:
    with pytest.raises(ClientError, match=r"InvalidSpotFleetRequestId\.NotFound"):
        fleets.modify("sfr-nowhere", TargetCapacity=1)
    with pytest.raises(ClientError, match=r"InvalidSpotFleetRequestId\.NotFound"):
        fleets.ec2.describe_spot_fleet_requests(SpotFleetRequestIds=["sfr-nowhere"])
    with pytest.raises(ClientError, match="OnDemandTargetCapacity 2 is above TargetCapacity 1"):
        fleets.modify(fleets.request(), TargetCapacity=1, OnDemandTargetCapacity=2)


def test_fails_on_two_subnets_of_one_zone(fleets: Fleets) -> None:
    (first,) = fleets.ec2.describe_subnets(SubnetIds=fleets.subnets[:1])["Subnets"]
    beside = fleets.ec2.create_subnet(
        VpcId=first["VpcId"], CidrBlock="10.0.9.0/24", AvailabilityZone=first["AvailabilityZone"]
    )["Subnet"]["SubnetId"]
    fleets.subnets.append(beside)
    with pytest.raises(ClientError, match="can't span different subnets from the same"):
        fleets.request()
    # Several sizes in one subnet are several overrides of it.
    fleets.subnets = [beside, beside]
    assert fleets.instances(fleets.request())[0]["SubnetId"] == beside
