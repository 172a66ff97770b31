"""VPCs and what is in them: subnets, routes, gateways, endpoints, flow logs."""

from typing import Any

from cloudformation.resource import Provisioned, Registry, ResourceRequest, ResourceType, tag_map
from cloudformation.resources.lookups import deletes, finds, look_up


def tags_for(request: ResourceRequest, kind: str) -> dict[str, Any]:
    """Return the TagSpecifications argument that gives a resource the template's tags."""
    tags = request.get("Tags")
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": tags}]} if tags else {}


def retag(request: ResourceRequest) -> None:
    """Replace a resource's old tags with the new ones."""
    old, new = tag_map(request.old.get("Tags")), tag_map(request.get("Tags"))
    ec2 = request.client("ec2")
    gone = [{"Key": key} for key in old if key not in new]
    if gone:
        ec2.delete_tags(Resources=[request.physical_id], Tags=gone)
    if request.old and new and new != old:
        tags = [{"Key": key, "Value": value} for key, value in new.items()]
        ec2.create_tags(Resources=[request.physical_id], Tags=tags)


def _create_vpc(request: ResourceRequest) -> Provisioned:
    ec2 = request.client("ec2")
    vpc = ec2.create_vpc(
        **request.pick("CidrBlock", "InstanceTenancy"), **tags_for(request, "vpc")
    )["Vpc"]
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


def _configure_vpc(request: ResourceRequest) -> None:
    ec2, vpc = request.client("ec2"), request.physical_id
    support = {"Value": request.get("EnableDnsSupport", True)}
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsSupport=support)
    hostnames = {"Value": request.get("EnableDnsHostnames", False)}
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames=hostnames)
    retag(request)


def _create_subnet(request: ResourceRequest) -> Provisioned:
    made = request.client("ec2").create_subnet(
        **request.pick("VpcId", "CidrBlock", "AvailabilityZone", "AvailabilityZoneId"),
        **tags_for(request, "subnet"),
    )["Subnet"]
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


def _configure_subnet(request: ResourceRequest) -> None:
    request.client("ec2").modify_subnet_attribute(
        SubnetId=request.physical_id,
        MapPublicIpOnLaunch={"Value": request.get("MapPublicIpOnLaunch", False)},
    )
    retag(request)


def _create_route_table(request: ResourceRequest) -> Provisioned:
    made = request.client("ec2").create_route_table(
        **request.pick("VpcId"), **tags_for(request, "route-table")
    )["RouteTable"]
    return Provisioned(id=made["RouteTableId"], attributes={"RouteTableId": made["RouteTableId"]})


def _associate(request: ResourceRequest) -> Provisioned:
    made = request.client("ec2").associate_route_table(**request.pick("RouteTableId", "SubnetId"))
    return Provisioned(id=made["AssociationId"], attributes={"Id": made["AssociationId"]})


def _reassociate(request: ResourceRequest) -> Provisioned:
    made = request.client("ec2").replace_route_table_association(
        AssociationId=request.physical_id, **request.pick("RouteTableId")
    )["NewAssociationId"]
    return Provisioned(id=made, attributes={"Id": made})


def _association_exists(request: ResourceRequest) -> bool:
    named = {"Name": "association.route-table-association-id", "Values": [request.physical_id]}
    tables = request.client("ec2").describe_route_tables(Filters=[named])
    return bool(tables["RouteTables"])


_ROUTE_TARGETS = ("GatewayId", "NatGatewayId", "InstanceId", "NetworkInterfaceId",
                  "VpcPeeringConnectionId", "TransitGatewayId", "VpcEndpointId",
                  "EgressOnlyInternetGatewayId")  # fmt: skip
_ROUTE_ENDS = ("DestinationCidrBlock", "DestinationIpv6CidrBlock", "DestinationPrefixListId")


def _create_route(request: ResourceRequest) -> Provisioned:
    request.client("ec2").create_route(
        **request.pick("RouteTableId", *_ROUTE_ENDS, *_ROUTE_TARGETS)
    )
    end = next(request.properties[name] for name in _ROUTE_ENDS if name in request.properties)
    return Provisioned(
        id=f"{request.properties['RouteTableId']}|{end}", attributes={"CidrBlock": end}
    )


def _update_route(request: ResourceRequest) -> Provisioned:
    request.client("ec2").replace_route(
        **request.pick("RouteTableId", *_ROUTE_ENDS, *_ROUTE_TARGETS)
    )
    return Provisioned(id=request.physical_id, attributes=request.attributes)


def _delete_route(request: ResourceRequest) -> None:
    request.client("ec2").delete_route(**request.pick("RouteTableId", *_ROUTE_ENDS))


def _route_exists(request: ResourceRequest) -> bool:
    table, _, end = request.physical_id.partition("|")
    found = look_up(request.client("ec2").describe_route_tables, RouteTableIds=[table])
    routes = found["RouteTables"][0]["Routes"] if found and found["RouteTables"] else []
    return any(end in route.values() for route in routes)


def _create_gateway(request: ResourceRequest) -> Provisioned:
    made = request.client("ec2").create_internet_gateway(**tags_for(request, "internet-gateway"))
    name = made["InternetGateway"]["InternetGatewayId"]
    return Provisioned(id=name, attributes={"InternetGatewayId": name})


def _attach_gateway(request: ResourceRequest) -> Provisioned:
    request.client("ec2").attach_internet_gateway(**request.pick("InternetGatewayId", "VpcId"))
    return Provisioned(
        id=f"IGW|{request.properties['VpcId']}", attributes={"AttachmentType": "IGW"}
    )


def _attachment_exists(request: ResourceRequest) -> bool:
    found = look_up(
        request.client("ec2").describe_internet_gateways,
        InternetGatewayIds=[request.properties["InternetGatewayId"]],
    )
    gateways = found["InternetGateways"] if found else []
    attached = [item["VpcId"] for gateway in gateways for item in gateway["Attachments"]]
    return request.properties["VpcId"] in attached


_ENDPOINT = ("VpcId", "ServiceName", "VpcEndpointType", "PolicyDocument", "RouteTableIds",
             "SubnetIds", "SecurityGroupIds", "PrivateDnsEnabled")  # fmt: skip


def _create_endpoint(request: ResourceRequest) -> Provisioned:
    made = request.client("ec2").create_vpc_endpoint(
        **request.pick(*_ENDPOINT), **tags_for(request, "vpc-endpoint")
    )["VpcEndpoint"]
    return Provisioned(
        id=made["VpcEndpointId"],
        attributes={
            "Id": made["VpcEndpointId"],
            "CreationTimestamp": str(made.get("CreationTimestamp", "")),
            "DnsEntries": [],
            "NetworkInterfaceIds": made.get("NetworkInterfaceIds", []),
        },
    )


def _update_endpoint(request: ResourceRequest) -> Provisioned:
    changes: dict[str, Any] = request.pick("PolicyDocument", "PrivateDnsEnabled")
    for name in ("RouteTableIds", "SubnetIds", "SecurityGroupIds"):
        old, new = request.old.get(name, []), request.get(name, [])
        if set(new) - set(old):
            changes[f"Add{name}"] = sorted(set(new) - set(old))
        if set(old) - set(new):
            changes[f"Remove{name}"] = sorted(set(old) - set(new))
    request.client("ec2").modify_vpc_endpoint(VpcEndpointId=request.physical_id, **changes)
    retag(request)
    return Provisioned(id=request.physical_id, attributes=request.attributes)


def _endpoint_exists(request: ResourceRequest) -> bool:
    found = look_up(
        request.client("ec2").describe_vpc_endpoints, VpcEndpointIds=[request.physical_id]
    )
    endpoints = found["VpcEndpoints"] if found else []
    return any(item["State"] != "deleted" for item in endpoints)


def _create_flow_log(request: ResourceRequest) -> Provisioned:
    made = request.client("ec2").create_flow_logs(
        ResourceIds=[request.properties["ResourceId"]],
        **request.pick("ResourceType", "TrafficType", "LogGroupName", "LogDestinationType",
                    "LogDestination", "LogFormat", "MaxAggregationInterval",
                    "DeliverLogsPermissionArn"),
        **tags_for(request, "vpc-flow-log"),
    )  # fmt: skip
    return Provisioned(id=made["FlowLogIds"][0], attributes={"Id": made["FlowLogIds"][0]})


def _flow_log_exists(request: ResourceRequest) -> bool:
    found = request.client("ec2").describe_flow_logs(FlowLogIds=[request.physical_id])
    return bool(found["FlowLogs"])


def _detach(request: ResourceRequest) -> None:
    request.client("ec2").detach_internet_gateway(**request.pick("InternetGatewayId", "VpcId"))


TYPES: Registry = {
    "AWS::EC2::VPC": ResourceType(
        create=_create_vpc,
        configure=_configure_vpc,
        delete=deletes("ec2", "delete_vpc", "VpcId"),
        exists=finds("ec2", "describe_vpcs", "VpcIds", listed=True),
    ),
    "AWS::EC2::Subnet": ResourceType(
        create=_create_subnet,
        configure=_configure_subnet,
        delete=deletes("ec2", "delete_subnet", "SubnetId"),
        exists=finds("ec2", "describe_subnets", "SubnetIds", listed=True),
    ),
    "AWS::EC2::RouteTable": ResourceType(
        create=_create_route_table,
        configure=retag,
        delete=deletes("ec2", "delete_route_table", "RouteTableId"),
        exists=finds("ec2", "describe_route_tables", "RouteTableIds", listed=True),
    ),
    "AWS::EC2::SubnetRouteTableAssociation": ResourceType(
        create=_associate,
        update=_reassociate,
        delete=deletes("ec2", "disassociate_route_table", "AssociationId"),
        exists=_association_exists,
    ),
    "AWS::EC2::Route": ResourceType(
        create=_create_route, update=_update_route, delete=_delete_route, exists=_route_exists
    ),
    "AWS::EC2::InternetGateway": ResourceType(
        create=_create_gateway,
        configure=retag,
        delete=deletes("ec2", "delete_internet_gateway", "InternetGatewayId"),
        exists=finds("ec2", "describe_internet_gateways", "InternetGatewayIds", listed=True),
    ),
    "AWS::EC2::VPCGatewayAttachment": ResourceType(
        create=_attach_gateway, delete=_detach, exists=_attachment_exists
    ),
    "AWS::EC2::VPCEndpoint": ResourceType(
        create=_create_endpoint,
        update=_update_endpoint,
        delete=deletes("ec2", "delete_vpc_endpoints", "VpcEndpointIds", listed=True),
        exists=_endpoint_exists,
    ),
    "AWS::EC2::FlowLog": ResourceType(
        create=_create_flow_log,
        configure=retag,
        delete=deletes("ec2", "delete_flow_logs", "FlowLogIds", listed=True),
        exists=_flow_log_exists,
    ),
}
