"""A network, a launch template and Spot fleets, for the tests of the embedded EC2."""

import base64
import contextlib
import json
from typing import Any

from embedded_aws import EmbeddedAws

ROLE = "arn:aws:iam::123456789012:role/fleet"
RUNNING = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]


def make_fleet_role(aws: EmbeddedAws) -> None:
    """Make the role `fleet`, unless it exists, with AWS's policy for it."""
    iam, policy = aws.client("iam"), "AmazonEC2SpotFleetTaggingRole"
    who = {"Service": "spotfleet.amazonaws.com"}
    trust = {"Statement": {"Effect": "Allow", "Principal": who, "Action": "sts:AssumeRole"}}
    with contextlib.suppress(iam.exceptions.EntityAlreadyExistsException):
        iam.create_role(RoleName="fleet", AssumeRolePolicyDocument=json.dumps(trust))
    iam.attach_role_policy(
        RoleName="fleet", PolicyArn=f"arn:aws:iam::aws:policy/service-role/{policy}"
    )


class Fleets:
    """A network, a launch template and the fleets of one test."""

    def __init__(self, aws: EmbeddedAws) -> None:
        self.ec2 = aws.client("ec2")
        make_fleet_role(aws)
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
