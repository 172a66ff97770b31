"""The doctor on the network, and on machines that others have."""

import json
import shlex
from typing import Any

import pytest
from moto.ec2.models.route_tables import Route

from stacks.doctor.account import DeployTarget
from stacks.doctor.network import network_can_be_used
from stacks.parameters import StackParameters
from tests.stack_names import named
from tests.stacks.doctor.conftest import Clinic, Examine
from tests.stacks.doctor.public_access import block_public_access


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
    # tests/across/test_doctors_commands.py types what is printed here.
    assert {each["state"] for each in found["network"]} == {"problem"}
    dns, gateway, interfaces = (each["what"] for each in found["network"])
    assert "enableDnsHostnames off" in dns and "no gateway endpoint of S3, which is free" in gateway
    assert f"{subnet_id} has no default route, and there are no endpoints" in interfaces
    ec2.modify_subnet_attribute(SubnetId=subnet_id, MapPublicIpOnLaunch={"Value": True})
    lines = examine(healthy, *given)["network"]
    assert "assigns public addresses, which max_usd does not count" in lines[0]["what"]
    assert f"{subnet_id} has no default route" in lines[-1]["what"], "they lead nowhere"
    (line,) = examine(healthy, given[0], "subnets=subnet-12345678")["network"]
    assert line["what"] == f"{vpc} in us-east-1 has no subnet-12345678"


def network_with_nat(ec2: Any, begin: str = "10.8") -> tuple[str, str, str]:
    """Return a VPC, its subnet and their route table."""
    vpc = ec2.create_vpc(CidrBlock=f"{begin}.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=f"{begin}.0.0/24")["Subnet"]["SubnetId"]
    nat = ec2.create_nat_gateway(SubnetId=subnet)["NatGateway"]["NatGatewayId"]
    found = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])
    table = found["RouteTables"][0]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat)
    return vpc, subnet, table


@pytest.mark.parametrize(("action", "state"), [("*", "ok"), ("s3:*", "warning")])
def test_an_endpoint_with_a_policy_of_its_own_is_named(
    healthy: Clinic, examine: Examine, action: str, state: str
) -> None:
    ec2 = healthy.aws.client("ec2")
    vpc, subnet, table = network_with_nat(ec2)
    statement = {"Effect": "Allow", "Principal": "*", "Action": action, "Resource": "*"}
    endpoint = ec2.create_vpc_endpoint(
        VpcId=vpc, ServiceName="com.amazonaws.us-east-1.s3", RouteTableIds=[table],
        PolicyDocument=json.dumps({"Statement": [statement]}), PrivateDnsEnabled=False,
    )["VpcEndpoint"]["VpcEndpointId"]  # fmt: skip
    (line,) = examine(healthy, f"vpc={vpc}", f"subnets={subnet}")["network"]
    is_told = line["what"].startswith(f"{endpoint} (s3) has a policy of its own")
    assert (line["state"], is_told) == (state, state == "warning")


def test_with_nat_only_s3_needs_an_endpoint(
    healthy: Clinic, examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vpc, subnet, _ = network_with_nat(healthy.aws.client("ec2"), "172.17")
    line, more = examine(healthy, f"vpc={vpc}", f"subnets={subnet}")["network"]
    assert line["state"] == more["state"] == "warning"
    assert "NAT charges each GB" in line["what"]
    assert f"{vpc} has addresses of 172.17.0.0/16, which Docker" in more["what"]
    gone = property(lambda route: "blackhole" if route.nat_gateway else "active")
    monkeypatch.setattr(Route, "state", gone)
    lines = examine(healthy, f"vpc={vpc}", f"subnets={subnet}")["network"]
    assert "has a default route to a gateway that is gone" in lines[-2]["what"]


@pytest.mark.parametrize(
    ("family", "block", "is_shut"),
    [("IPv4", "10.0.0.0/8", False), ("IPv4", "10.6.1.0/24", True), ("IPv6", "::/0", True)],
)
def test_an_endpoint_may_admit_its_callers_by_a_prefix_list(
    healthy: Clinic, family: str, block: str, is_shut: bool
) -> None:
    ec2 = healthy.aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.6.0.0/16")["Vpc"]["VpcId"]
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.6.0.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="corp", Description="x", VpcId=vpc)["GroupId"]
    listed = ec2.create_managed_prefix_list(
        PrefixListName="corp", Entries=[{"Cidr": block}], MaxEntries=1, AddressFamily=family
    )["PrefixList"]["PrefixListId"]
    rule = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443}
    rules = [{**rule, "PrefixListIds": [{"PrefixListId": listed}]}]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rules)
    ec2.create_vpc_endpoint(
        VpcId=vpc, ServiceName="com.amazonaws.us-east-1.ssm", VpcEndpointType="Interface",
        SubnetIds=[subnet], SecurityGroupIds=[group], PrivateDnsEnabled=True,
    )  # fmt: skip
    given = StackParameters.for_size("g5.xlarge", vpc=vpc, subnets=subnet)
    target = DeployTarget(client=healthy.client, region="us-east-1", parameters=given)
    said = [each.what for each in network_can_be_used(target)]
    assert any("do not admit the subnets to port 443" in each for each in said) is is_shut


@pytest.mark.parametrize(
    ("mode", "is_public", "needed"),
    [
        ("off", True, ""),
        ("block-ingress", False, ""),  # which leaves NAT
        ("block-ingress", True, "allow-bidirectional"),
        ("block-bidirectional", False, "allow-egress"),
    ],
)
def test_blocked_public_access_matters_by_the_way_out(
    healthy: Clinic,
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    is_public: bool,
    needed: str,
) -> None:
    ec2 = healthy.aws.client("ec2")
    block_public_access(monkeypatch, mode)
    vpc = ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.7.0.0/24")["Subnet"]["SubnetId"]
    ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": is_public})
    given = (f"vpc={vpc}", f"subnets={subnet}")
    assert "public access" not in examine(healthy, *given), "endpoints have no gateway"
    table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])
    way = {"NatGatewayId": ec2.create_nat_gateway(SubnetId=subnet)["NatGateway"]["NatGatewayId"]}
    if is_public:
        gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
        way = {"GatewayId": gateway}
    table_id = table["RouteTables"][0]["RouteTableId"]
    ec2.create_route(RouteTableId=table_id, DestinationCidrBlock="0.0.0.0/0", **way)
    found = examine(healthy, *given).get("public access", [])
    assert [each["fix"].split()[-1] for each in found] == ([needed] if needed else [])


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
    of_groups = examine(healthy, *given, "fleet=asg")["network"]
    assert "takes only one" not in str(of_groups)
    assert "5 endpoints in 2 zones" in of_groups[-1]["what"], "Auto Scaling's is the fifth"
    # Of one zone's subnets it keeps the one with the most free addresses.
    taken = shlex.split(line["fix"])[-1]
    assert set(taken.removeprefix("subnets=").split(",")) == {large, other}
    assert "takes only one" not in str(examine(healthy, given[0], taken)["network"])
