"""VPCs and what is in them: subnets, routes, gateways, endpoints, flow logs."""

from collections.abc import Callable
from typing import Any

from botocore import xform_name

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, creates, deletes, finds, retag, tags_for


def retag_ec2(request: HandlerRequest) -> None:
    retag(request, "ec2", "create_tags", "delete_tags", Resources=request.physical_id)


def _create_vpc(request: HandlerRequest) -> Provisioned:
    ec2 = request.client("ec2")
    vpc = call(request, "ec2", "create_vpc", **tags_for(request, "vpc"))["Vpc"]
    mine = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}]
    group = ec2.describe_security_groups(Filters=mine)["SecurityGroups"][0]["GroupId"]
    acl = ec2.describe_network_acls(Filters=mine)["NetworkAcls"][0]["NetworkAclId"]
    return Provisioned(
        id=vpc["VpcId"],
        attributes={
            "VpcId": vpc["VpcId"],
            "CidrBlock": vpc["CidrBlock"],
            "DefaultSecurityGroup": group,
            "DefaultNetworkAcl": acl,
            "CidrBlockAssociations": [
                item["AssociationId"] for item in vpc.get("CidrBlockAssociationSet", [])
            ],
            "Ipv6CidrBlocks": [],
        },
    )


def _configure_vpc(request: HandlerRequest) -> None:
    ec2, vpc = request.client("ec2"), request.physical_id
    support = {"Value": request.get("EnableDnsSupport", True)}
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsSupport=support)
    hostnames = {"Value": request.get("EnableDnsHostnames", False)}
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames=hostnames)
    retag_ec2(request)


def _create_subnet(request: HandlerRequest) -> Provisioned:
    made = call(request, "ec2", "create_subnet", **tags_for(request, "subnet"))["Subnet"]
    acls = request.client("ec2").describe_network_acls(
        Filters=[{"Name": "association.subnet-id", "Values": [made["SubnetId"]]}]
    )["NetworkAcls"]
    association = acls[0]["Associations"][0]["NetworkAclAssociationId"] if acls else ""
    names = ("SubnetId", "VpcId", "CidrBlock", "AvailabilityZone", "AvailabilityZoneId")
    attributes = {name: made[name] for name in names if name in made}
    return Provisioned(
        id=made["SubnetId"],
        attributes=attributes | {"NetworkAclAssociationId": association, "Ipv6CidrBlocks": []},
    )


def _configure_subnet(request: HandlerRequest) -> None:
    request.client("ec2").modify_subnet_attribute(
        SubnetId=request.physical_id,
        MapPublicIpOnLaunch={"Value": request.get("MapPublicIpOnLaunch", False)},
    )
    retag_ec2(request)


def _reassociate(request: HandlerRequest) -> Provisioned:
    made = request.client("ec2").replace_route_table_association(
        AssociationId=request.physical_id, **request.pick("RouteTableId")
    )["NewAssociationId"]
    return Provisioned(id=made, attributes={"Id": made})


_ROUTE_ENDS = ("DestinationCidrBlock", "DestinationIpv6CidrBlock", "DestinationPrefixListId")


def _create_route(request: HandlerRequest) -> Provisioned:
    call(request, "ec2", "create_route")
    end = next(request.properties[name] for name in _ROUTE_ENDS if name in request.properties)
    return Provisioned(
        id=f"{request.properties['RouteTableId']}|{end}", attributes={"CidrBlock": end}
    )


def _update_route(request: HandlerRequest) -> Provisioned:
    call(request, "ec2", "replace_route")
    return Provisioned(id=request.physical_id, attributes=request.attributes)


def _has_route(request: HandlerRequest, table: dict[str, Any]) -> bool:
    wanted, _, end = request.physical_id.partition("|")
    return table["RouteTableId"] == wanted and any(end in item.values() for item in table["Routes"])


def _attach_gateway(request: HandlerRequest) -> Provisioned:
    call(request, "ec2", "attach_internet_gateway")
    return Provisioned(
        id=f"IGW|{request.properties['VpcId']}", attributes={"AttachmentType": "IGW"}
    )


def _is_attached(request: HandlerRequest, gateway: dict[str, Any]) -> bool:
    wanted = request.properties
    return gateway["InternetGatewayId"] == wanted["InternetGatewayId"] and any(
        item["VpcId"] == wanted["VpcId"] for item in gateway["Attachments"]
    )


def _create_nat_gateway(request: HandlerRequest) -> Provisioned:
    tags = tags_for(request, "natgateway")
    made = call(request, "ec2", "create_nat_gateway", **tags)["NatGateway"]["NatGatewayId"]
    return Provisioned(id=made, attributes={"NatGatewayId": made})


def _release_address(request: HandlerRequest) -> None:
    allocation = request.attributes["AllocationId"]
    request.client("ec2").release_address(AllocationId=allocation)


def _is_not_deleted(request: HandlerRequest, found: dict[str, Any]) -> bool:
    return bool(found["State"] != "deleted")


def _create_endpoint(request: HandlerRequest) -> Provisioned:
    tags = tags_for(request, "vpc-endpoint")
    made = call(request, "ec2", "create_vpc_endpoint", **tags)["VpcEndpoint"]
    return Provisioned(
        id=made["VpcEndpointId"],
        attributes={
            "Id": made["VpcEndpointId"],
            "CreationTimestamp": str(made.get("CreationTimestamp", "")),
            "DnsEntries": [],
            "NetworkInterfaceIds": made.get("NetworkInterfaceIds", []),
        },
    )


def _update_endpoint(request: HandlerRequest) -> Provisioned:
    changes: dict[str, Any] = {}
    for name in ("RouteTableIds", "SubnetIds", "SecurityGroupIds"):
        changes[f"Add{name}"] = sorted(request.added(name)) or None
        changes[f"Remove{name}"] = sorted(request.removed(name)) or None
    call(request, "ec2", "modify_vpc_endpoint", VpcEndpointId=request.physical_id, **changes)
    retag_ec2(request)
    return Provisioned(id=request.physical_id, attributes=request.attributes)


def _create_flow_log(request: HandlerRequest) -> Provisioned:
    resource = request.properties["ResourceId"]
    tags = tags_for(request, "vpc-flow-log")
    made = call(request, "ec2", "create_flow_logs", ResourceIds=[resource], **tags)
    return Provisioned(id=made["FlowLogIds"][0], attributes={"Id": made["FlowLogIds"][0]})


def _named_after_its_calls(
    name: str,
    *,
    create: Callable[[HandlerRequest], Provisioned] | None = None,
    configure: Callable[[HandlerRequest], None] = retag_ec2,
) -> ResourceType:
    """Make a type whose calls follow EC2's rule: create_vpc, delete_vpc, describe_vpcs, VpcId."""
    call_name = xform_name(name)
    if create is None:
        create = creates(
            "ec2",
            f"create_{call_name}",
            tag_kind=call_name.replace("_", "-"),
            answer=name,
            by=f"{name}Id",
            attributes=[f"{name}Id"],
        )
    return ResourceType(
        create=create,
        configure=configure,
        delete=deletes("ec2", f"delete_{call_name}", by=f"{name}Id"),
        exists=finds("ec2", f"describe_{call_name}s", by=f"{name}Ids"),
    )


TYPES: Registry = {
    "AWS::EC2::VPC": _named_after_its_calls("Vpc", create=_create_vpc, configure=_configure_vpc),
    "AWS::EC2::Subnet": _named_after_its_calls(
        "Subnet", create=_create_subnet, configure=_configure_subnet
    ),
    "AWS::EC2::RouteTable": _named_after_its_calls("RouteTable"),
    "AWS::EC2::SubnetRouteTableAssociation": ResourceType(
        create=creates(
            "ec2", "associate_route_table", by="AssociationId", attributes={"Id": "AssociationId"}
        ),
        update=_reassociate,
        delete=deletes("ec2", "disassociate_route_table", by="AssociationId"),
        exists=finds(
            "ec2",
            "describe_route_tables",
            answer="RouteTables",
            where=lambda request, table: any(
                item["RouteTableAssociationId"] == request.physical_id
                for item in table["Associations"]
            ),
        ),
    ),
    "AWS::EC2::Route": ResourceType(
        create=_create_route,
        update=_update_route,
        delete=deletes("ec2", "delete_route", "RouteTableId", *_ROUTE_ENDS),
        exists=finds("ec2", "describe_route_tables", answer="RouteTables", where=_has_route),
    ),
    "AWS::EC2::InternetGateway": _named_after_its_calls("InternetGateway"),
    "AWS::EC2::EIP": ResourceType(
        create=creates(
            "ec2",
            "allocate_address",
            tag_kind="elastic-ip",
            by="PublicIp",
            attributes=["AllocationId", "PublicIp"],
        ),
        delete=_release_address,
        exists=finds("ec2", "describe_addresses", by="PublicIps", answer="Addresses"),
    ),
    "AWS::EC2::NatGateway": ResourceType(
        create=_create_nat_gateway,
        configure=retag_ec2,
        delete=deletes("ec2", "delete_nat_gateway", by="NatGatewayId"),
        exists=finds(
            "ec2",
            "describe_nat_gateways",
            by="NatGatewayIds",
            answer="NatGateways",
            where=_is_not_deleted,
        ),
    ),
    "AWS::EC2::VPCGatewayAttachment": ResourceType(
        create=_attach_gateway,
        delete=deletes("ec2", "detach_internet_gateway", "InternetGatewayId", "VpcId"),
        exists=finds(
            "ec2", "describe_internet_gateways", answer="InternetGateways", where=_is_attached
        ),
    ),
    "AWS::EC2::VPCEndpoint": ResourceType(
        create=_create_endpoint,
        update=_update_endpoint,
        delete=deletes("ec2", "delete_vpc_endpoints", by="VpcEndpointIds"),
        exists=finds(
            "ec2",
            "describe_vpc_endpoints",
            by="VpcEndpointIds",
            answer="VpcEndpoints",
            where=_is_not_deleted,
        ),
    ),
    "AWS::EC2::FlowLog": ResourceType(
        create=_create_flow_log,
        configure=retag_ec2,
        delete=deletes("ec2", "delete_flow_logs", by="FlowLogIds"),
        exists=finds("ec2", "describe_flow_logs", by="FlowLogIds", answer="FlowLogs"),
    ),
}
