"""VPCs and what lies in them: subnets, routes, gateways, endpoints, flow logs, security groups."""

from collections.abc import Callable
from typing import Any

from cloudformation.resource import Made, Registry, ResourceType, Wish, tag_map
from cloudformation.resources.asking import ask, known


def tags_for(wish: Wish, kind: str) -> dict[str, Any]:
    """The TagSpecifications argument that makes a resource with the template's tags."""
    tags = wish.get("Tags")
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": tags}]} if tags else {}


def retag(wish: Wish) -> None:
    """Bring a resource's tags from the old ones to the new ones."""
    old, new = tag_map(wish.old.get("Tags")), tag_map(wish.get("Tags"))
    ec2 = wish.client("ec2")
    gone = [{"Key": key} for key in old if key not in new]
    if gone:
        ec2.delete_tags(Resources=[wish.physical_id], Tags=gone)
    if wish.old and new and new != old:
        tags = [{"Key": key, "Value": value} for key, value in new.items()]
        ec2.create_tags(Resources=[wish.physical_id], Tags=tags)


def described(operation: str, argument: str) -> Callable[[Wish], bool]:
    """Whether EC2's describe finds the physical id."""

    def exists(wish: Wish) -> bool:
        return known(getattr(wish.client("ec2"), operation), **{argument: [wish.physical_id]})

    return exists


def deleted(operation: str, argument: str) -> Callable[[Wish], None]:
    def delete(wish: Wish) -> None:
        getattr(wish.client("ec2"), operation)(**{argument: wish.physical_id})

    return delete


def _create_vpc(wish: Wish) -> Made:
    ec2 = wish.client("ec2")
    vpc = ec2.create_vpc(**wish.pick("CidrBlock", "InstanceTenancy"), **tags_for(wish, "vpc"))[
        "Vpc"
    ]
    mine = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}]
    group = ec2.describe_security_groups(Filters=mine)["SecurityGroups"][0]["GroupId"]
    acl = ec2.describe_network_acls(Filters=mine)["NetworkAcls"][0]["NetworkAclId"]
    return Made(
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


def _configure_vpc(wish: Wish) -> None:
    ec2, vpc = wish.client("ec2"), wish.physical_id
    support = {"Value": wish.get("EnableDnsSupport", True)}
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsSupport=support)
    hostnames = {"Value": wish.get("EnableDnsHostnames", False)}
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames=hostnames)
    retag(wish)


def _create_subnet(wish: Wish) -> Made:
    made = wish.client("ec2").create_subnet(
        **wish.pick("VpcId", "CidrBlock", "AvailabilityZone", "AvailabilityZoneId"),
        **tags_for(wish, "subnet"),
    )["Subnet"]
    acls = wish.client("ec2").describe_network_acls(
        Filters=[{"Name": "association.subnet-id", "Values": [made["SubnetId"]]}]
    )["NetworkAcls"]
    association = acls[0]["Associations"][0]["NetworkAclAssociationId"] if acls else ""
    names = ("SubnetId", "VpcId", "CidrBlock", "AvailabilityZone", "AvailabilityZoneId")
    attributes = {name: made[name] for name in names if name in made}
    return Made(
        id=made["SubnetId"],
        attributes=attributes | {"NetworkAclAssociationId": association, "Ipv6CidrBlocks": []},
    )


def _configure_subnet(wish: Wish) -> None:
    wish.client("ec2").modify_subnet_attribute(
        SubnetId=wish.physical_id,
        MapPublicIpOnLaunch={"Value": wish.get("MapPublicIpOnLaunch", False)},
    )
    retag(wish)


def _create_route_table(wish: Wish) -> Made:
    made = wish.client("ec2").create_route_table(
        **wish.pick("VpcId"), **tags_for(wish, "route-table")
    )["RouteTable"]
    return Made(id=made["RouteTableId"], attributes={"RouteTableId": made["RouteTableId"]})


def _associate(wish: Wish) -> Made:
    made = wish.client("ec2").associate_route_table(**wish.pick("RouteTableId", "SubnetId"))
    return Made(id=made["AssociationId"], attributes={"Id": made["AssociationId"]})


def _reassociate(wish: Wish) -> Made:
    made = wish.client("ec2").replace_route_table_association(
        AssociationId=wish.physical_id, **wish.pick("RouteTableId")
    )["NewAssociationId"]
    return Made(id=made, attributes={"Id": made})


def _association_exists(wish: Wish) -> bool:
    named = {"Name": "association.route-table-association-id", "Values": [wish.physical_id]}
    tables = wish.client("ec2").describe_route_tables(Filters=[named])
    return bool(tables["RouteTables"])


_ROUTE_TARGETS = ("GatewayId", "NatGatewayId", "InstanceId", "NetworkInterfaceId",
                  "VpcPeeringConnectionId", "TransitGatewayId", "VpcEndpointId",
                  "EgressOnlyInternetGatewayId")  # fmt: skip
_ROUTE_ENDS = ("DestinationCidrBlock", "DestinationIpv6CidrBlock", "DestinationPrefixListId")


def _create_route(wish: Wish) -> Made:
    wish.client("ec2").create_route(**wish.pick("RouteTableId", *_ROUTE_ENDS, *_ROUTE_TARGETS))
    end = next(wish.properties[name] for name in _ROUTE_ENDS if name in wish.properties)
    return Made(id=f"{wish.properties['RouteTableId']}|{end}", attributes={"CidrBlock": end})


def _update_route(wish: Wish) -> Made:
    wish.client("ec2").replace_route(**wish.pick("RouteTableId", *_ROUTE_ENDS, *_ROUTE_TARGETS))
    return Made(id=wish.physical_id, attributes=wish.attributes)


def _delete_route(wish: Wish) -> None:
    wish.client("ec2").delete_route(**wish.pick("RouteTableId", *_ROUTE_ENDS))


def _route_exists(wish: Wish) -> bool:
    table, _, end = wish.physical_id.partition("|")
    found = ask(wish.client("ec2").describe_route_tables, RouteTableIds=[table])
    routes = found["RouteTables"][0]["Routes"] if found and found["RouteTables"] else []
    return any(end in route.values() for route in routes)


def _create_gateway(wish: Wish) -> Made:
    made = wish.client("ec2").create_internet_gateway(**tags_for(wish, "internet-gateway"))
    name = made["InternetGateway"]["InternetGatewayId"]
    return Made(id=name, attributes={"InternetGatewayId": name})


def _attach_gateway(wish: Wish) -> Made:
    wish.client("ec2").attach_internet_gateway(**wish.pick("InternetGatewayId", "VpcId"))
    return Made(id=f"IGW|{wish.properties['VpcId']}", attributes={"AttachmentType": "IGW"})


def _attachment_exists(wish: Wish) -> bool:
    found = ask(
        wish.client("ec2").describe_internet_gateways,
        InternetGatewayIds=[wish.properties["InternetGatewayId"]],
    )
    gateways = found["InternetGateways"] if found else []
    attached = [item["VpcId"] for gateway in gateways for item in gateway["Attachments"]]
    return wish.properties["VpcId"] in attached


_ENDPOINT = ("VpcId", "ServiceName", "VpcEndpointType", "PolicyDocument", "RouteTableIds",
             "SubnetIds", "SecurityGroupIds", "PrivateDnsEnabled")  # fmt: skip


def _create_endpoint(wish: Wish) -> Made:
    made = wish.client("ec2").create_vpc_endpoint(
        **wish.pick(*_ENDPOINT), **tags_for(wish, "vpc-endpoint")
    )["VpcEndpoint"]
    return Made(
        id=made["VpcEndpointId"],
        attributes={
            "Id": made["VpcEndpointId"],
            "CreationTimestamp": str(made.get("CreationTimestamp", "")),
            "DnsEntries": [],
            "NetworkInterfaceIds": made.get("NetworkInterfaceIds", []),
        },
    )


def _update_endpoint(wish: Wish) -> Made:
    changes: dict[str, Any] = wish.pick("PolicyDocument", "PrivateDnsEnabled")
    for name in ("RouteTableIds", "SubnetIds", "SecurityGroupIds"):
        old, new = wish.old.get(name, []), wish.get(name, [])
        if set(new) - set(old):
            changes[f"Add{name}"] = sorted(set(new) - set(old))
        if set(old) - set(new):
            changes[f"Remove{name}"] = sorted(set(old) - set(new))
    wish.client("ec2").modify_vpc_endpoint(VpcEndpointId=wish.physical_id, **changes)
    retag(wish)
    return Made(id=wish.physical_id, attributes=wish.attributes)


def _endpoint_exists(wish: Wish) -> bool:
    found = ask(wish.client("ec2").describe_vpc_endpoints, VpcEndpointIds=[wish.physical_id])
    endpoints = found["VpcEndpoints"] if found else []
    return any(item["State"] != "deleted" for item in endpoints)


def _create_flow_log(wish: Wish) -> Made:
    made = wish.client("ec2").create_flow_logs(
        ResourceIds=[wish.properties["ResourceId"]],
        **wish.pick("ResourceType", "TrafficType", "LogGroupName", "LogDestinationType",
                    "LogDestination", "LogFormat", "MaxAggregationInterval",
                    "DeliverLogsPermissionArn"),
        **tags_for(wish, "vpc-flow-log"),
    )  # fmt: skip
    return Made(id=made["FlowLogIds"][0], attributes={"Id": made["FlowLogIds"][0]})


def _flow_log_exists(wish: Wish) -> bool:
    found = wish.client("ec2").describe_flow_logs(FlowLogIds=[wish.physical_id])
    return bool(found["FlowLogs"])


def _detach(wish: Wish) -> None:
    wish.client("ec2").detach_internet_gateway(**wish.pick("InternetGatewayId", "VpcId"))


TYPES: Registry = {
    "AWS::EC2::VPC": ResourceType(
        create=_create_vpc,
        configure=_configure_vpc,
        delete=deleted("delete_vpc", "VpcId"),
        exists=described("describe_vpcs", "VpcIds"),
    ),
    "AWS::EC2::Subnet": ResourceType(
        create=_create_subnet,
        configure=_configure_subnet,
        delete=deleted("delete_subnet", "SubnetId"),
        exists=described("describe_subnets", "SubnetIds"),
    ),
    "AWS::EC2::RouteTable": ResourceType(
        create=_create_route_table,
        configure=retag,
        delete=deleted("delete_route_table", "RouteTableId"),
        exists=described("describe_route_tables", "RouteTableIds"),
    ),
    "AWS::EC2::SubnetRouteTableAssociation": ResourceType(
        create=_associate,
        update=_reassociate,
        delete=deleted("disassociate_route_table", "AssociationId"),
        exists=_association_exists,
    ),
    "AWS::EC2::Route": ResourceType(
        create=_create_route, update=_update_route, delete=_delete_route, exists=_route_exists
    ),
    "AWS::EC2::InternetGateway": ResourceType(
        create=_create_gateway,
        configure=retag,
        delete=deleted("delete_internet_gateway", "InternetGatewayId"),
        exists=described("describe_internet_gateways", "InternetGatewayIds"),
    ),
    "AWS::EC2::VPCGatewayAttachment": ResourceType(
        create=_attach_gateway, delete=_detach, exists=_attachment_exists
    ),
    "AWS::EC2::VPCEndpoint": ResourceType(
        create=_create_endpoint,
        update=_update_endpoint,
        delete=lambda wish: wish.client("ec2").delete_vpc_endpoints(
            VpcEndpointIds=[wish.physical_id]
        ),
        exists=_endpoint_exists,
    ),
    "AWS::EC2::FlowLog": ResourceType(
        create=_create_flow_log,
        configure=retag,
        delete=lambda wish: wish.client("ec2").delete_flow_logs(FlowLogIds=[wish.physical_id]),
        exists=_flow_log_exists,
    ),
}
