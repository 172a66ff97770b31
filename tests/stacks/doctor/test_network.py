"""The doctor on the network, and on machines that others have."""

import itertools
import shlex
from typing import Any

from tests.stack_names import named
from tests.stacks.doctor.conftest import Clinic, Examine


def test_a_region_without_room_for_a_network_is_a_problem(
    healthy: Clinic, examine: Examine
) -> None:
    healthy.vpcs = 1.0
    (line,) = examine(healthy)["network"]
    assert (line["state"], line["what"]) == (
        "problem",
        "1 of 1 VPCs are in use in us-east-1; -c vpc= uses one of them",
    )
    assert "--service-code vpc --quota-code L-F678F1CE" in line["fix"]
    healthy.vpcs = "5"  # nobody changed it: only AWS's default is there
    (line,) = examine(healthy)["network"]
    assert (line["state"], line["what"]) == ("ok", "1 of 5 VPCs are in use in us-east-1")


def test_an_existing_network_without_a_way_out_gets_it_by_the_fixes(
    healthy: Clinic, examine: Examine
) -> None:
    ec2 = healthy.aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/24", AvailabilityZone="us-east-1c")
    subnet_id = subnet["Subnet"]["SubnetId"]
    given = (f"vpc={vpc}", f"subnets={subnet_id}")
    found = examine(healthy, *given)
    # The zone that counts for the size is the subnet's; no room for another VPC is needed.
    assert found["size"][0]["what"].endswith("the subnets are in us-east-1c")
    # It could not be moved by `zones`, which synthesis refuses together with `vpc`.
    healthy.scores = [("us-east-1a", 9), ("us-east-1c", 1)]
    fix = examine(healthy, *given, "size=g5.xlarge")["spot capacity"][0]["fix"]
    assert fix.startswith(f"aws ec2 describe-subnets --filters Name=vpc-id,Values={vpc} ")
    assert "Name=availability-zone,Values=us-east-1a,us-east-1c --region us-east-1" in fix
    lacking = [each["what"].split(" to ")[-1].split(":")[0] for each in found["network"]]
    assert lacking[1:] == ["ec2", "monitoring", "ssm", "ssmmessages"]
    assert "no gateway endpoint of S3" in lacking[0]
    assert {each["state"] for each in found["network"]} == {"problem"}
    for each in found["network"]:
        _create_endpoint(ec2, shlex.split(each["fix"]))
    (line,) = examine(healthy, *given)["network"]
    assert (line["state"], line["what"]) == (
        "ok", f"{subnet_id} of {vpc} reach AWS by endpoints, without an address",
    )  # fmt: skip
    ec2.modify_subnet_attribute(SubnetId=subnet_id, MapPublicIpOnLaunch={"Value": True})
    (line,) = examine(healthy, *given)["network"]
    assert line["state"] == "warning"
    assert "assigns public addresses, which max_usd does not count" in line["what"]
    (line,) = examine(healthy, given[0], "subnets=subnet-12345678")["network"]
    assert line["what"] == f"{vpc} in us-east-1 has no subnet-12345678"


def _create_endpoint(ec2: Any, words: list[str]) -> None:
    """Do what `aws ec2 create-vpc-endpoint` would."""

    def given(option: str) -> list[str]:
        after = words[words.index(option) + 1 :] if option in words else []
        return list(itertools.takewhile(lambda word: not word.startswith("--"), after))

    ec2.create_vpc_endpoint(
        VpcId=given("--vpc-id")[0],
        ServiceName=given("--service-name")[0],
        VpcEndpointType=(given("--vpc-endpoint-type") or ["Gateway"])[0],
        RouteTableIds=given("--route-table-ids"),
        SubnetIds=given("--subnet-ids"),
        PrivateDnsEnabled="--private-dns-enabled" in words,
    )


def test_with_nat_only_s3_needs_an_endpoint(healthy: Clinic, examine: Examine) -> None:
    ec2 = healthy.aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.8.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.8.0.0/24")["Subnet"]["SubnetId"]
    nat = ec2.create_nat_gateway(SubnetId=subnet)["NatGateway"]["NatGatewayId"]
    table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])
    ec2.create_route(
        RouteTableId=table["RouteTables"][0]["RouteTableId"],
        DestinationCidrBlock="0.0.0.0/0",
        NatGatewayId=nat,
    )
    (line,) = examine(healthy, f"vpc={vpc}", f"subnets={subnet}")["network"]
    assert line["state"] == "warning"
    assert "NAT charges each GB" in line["what"]


def test_machines_of_other_stacks_use_up_the_quota(healthy: Clinic, examine: Examine) -> None:
    ec2 = healthy.aws.client("ec2")
    started = ec2.run_instances(
        ImageId=ec2.describe_images()["Images"][0]["ImageId"],
        InstanceType="g5.16xlarge",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[
            {
                "ResourceType": "instance",
                "Tags": [{"Key": "Stack", "Value": named("Training-vision")}],
            }
        ],
    )["Instances"][0]["InstanceId"]
    (line,) = examine(healthy, "on_demand_base=1")["on-demand quota"]
    assert line["state"] == "warning"
    assert line["what"].endswith("other machines of the account use 64: the run waits for one of "
                                 "them to end")  # fmt: skip
    assert "--desired-value 80" in line["fix"]
    # Its own machine ends before the next one starts.
    assert (
        examine(healthy, "on_demand_base=1", "name=vision")["on-demand quota"][0]["state"] == "ok"
    )
    assert examine(healthy)["spot quota"][0]["state"] == "ok"
    ec2.terminate_instances(InstanceIds=[started])


def test_fails_for_two_subnets_of_one_zone_until_its_fix_is_taken(
    healthy: Clinic, examine: Examine
) -> None:
    ec2 = healthy.aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.8.0.0/16")["Vpc"]["VpcId"]
    blocks = {"10.8.0.0/28": "us-east-1a", "10.8.1.0/24": "us-east-1a", "10.8.2.0/24": "us-east-1b"}
    small, large, other = (
        ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=zone)["Subnet"]["SubnetId"]
        for block, zone in blocks.items()
    )
    given = (f"vpc={vpc}", f"subnets={large},{other},{small}")
    (line,) = examine(healthy, *given)["network"]
    assert (line["state"], line["what"]) == (
        "problem",
        f"{large}, {other}, {small} are in us-east-1a, us-east-1b: a Spot fleet takes only one "
        "subnet of each zone",
    )
    assert "takes only one" not in str(examine(healthy, *given, "fleet=asg")["network"])
    # Of one zone's subnets it keeps the one with the most free addresses.
    taken = shlex.split(line["fix"])[-1]
    assert set(taken.removeprefix("subnets=").split(",")) == {large, other}
    assert "takes only one" not in str(examine(healthy, given[0], taken)["network"])
