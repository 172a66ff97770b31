"""EC2's networks: VPCs and their parts, and security groups."""

import time
from collections.abc import Callable
from typing import Any

from botocore import xform_name
from botocore.exceptions import ClientError

from embedded_aws.cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from embedded_aws.cloudformation.resources.calls import call, creates, deletes, finds, retag

# CloudFormation's retry time is not documented; people report a quarter of an hour and more.
_IN_USE_SECONDS, _POLL_SECONDS = 900.0, 0.2
_EVERYTHING = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
_ROUTE_ENDS = ("DestinationCidrBlock", "DestinationIpv6CidrBlock", "DestinationPrefixListId")


def _retag(request: HandlerRequest) -> None:
    retag(request, "ec2", "create_tags", "delete_tags", Resources=request.physical_id)


def _unchanged(request: HandlerRequest) -> Provisioned:
    """Return the same id and attributes, as after an update in place."""
    return Provisioned(id=request.physical_id, attributes=request.attributes)


# VPCs


def _configure_vpc(request: HandlerRequest) -> None:
    for name, default in (("EnableDnsSupport", True), ("EnableDnsHostnames", False)):
        value = {"Value": request.get(name, default)}
        request.client("ec2").modify_vpc_attribute(VpcId=request.physical_id, **{name: value})
    _retag(request)


def _configure_subnet(request: HandlerRequest) -> None:
    request.client("ec2").modify_subnet_attribute(
        SubnetId=request.physical_id,
        MapPublicIpOnLaunch={"Value": request.get("MapPublicIpOnLaunch", False)},
    )
    _retag(request)


def _reassociate(request: HandlerRequest) -> Provisioned:
    made = request.client("ec2").replace_route_table_association(
        AssociationId=request.physical_id, **request.pick("RouteTableId")
    )["NewAssociationId"]
    return Provisioned(id=made, attributes={"Id": made})


def _create_route(request: HandlerRequest) -> Provisioned:
    call(request, "ec2", "create_route")
    end = next(request.properties[name] for name in _ROUTE_ENDS if name in request.properties)
    return Provisioned(
        id=f"{request.properties['RouteTableId']}|{end}", attributes={"CidrBlock": end}
    )


def _update_route(request: HandlerRequest) -> Provisioned:
    call(request, "ec2", "replace_route")
    return _unchanged(request)


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


def _is_not_deleted(_: HandlerRequest, found: dict[str, Any]) -> bool:
    return bool(found.get("State") != "deleted")


def _update_endpoint(request: HandlerRequest) -> Provisioned:
    changes: dict[str, Any] = {}
    for name in ("RouteTableIds", "SubnetIds", "SecurityGroupIds"):
        changes[f"Add{name}"] = sorted(request.added(name)) or None
        changes[f"Remove{name}"] = sorted(request.removed(name)) or None
    call(request, "ec2", "modify_vpc_endpoint", VpcEndpointId=request.physical_id, **changes)
    _retag(request)
    return _unchanged(request)


# Security groups


def _configure_group(request: HandlerRequest) -> None:
    ec2, group = request.client("ec2"), request.physical_id
    if not request.old and request.get("SecurityGroupEgress"):
        # A new group allows all egress; CloudFormation revokes that if the template has rules.
        ec2.revoke_security_group_egress(GroupId=group, IpPermissions=_EVERYTHING)
    for direction in ("ingress", "egress"):
        name = f"SecurityGroup{direction.capitalize()}"
        for verb, rules in (("revoke", request.removed(name)), ("authorize", request.added(name))):
            permissions = [_permission(rule) for rule in rules]
            if permissions:
                operation = getattr(ec2, f"{verb}_security_group_{direction}")
                operation(GroupId=group, IpPermissions=permissions)
    _retag(request)


def _permission(rule: dict[str, Any]) -> dict[str, Any]:
    """Return one rule of the template in the API's form."""
    made: dict[str, Any] = {"IpProtocol": rule.get("IpProtocol", "-1")}
    made |= {name: rule[name] for name in ("FromPort", "ToPort") if name in rule}
    note = {"Description": rule["Description"]} if "Description" in rule else {}
    if "CidrIp" in rule:
        made["IpRanges"] = [{"CidrIp": rule["CidrIp"], **note}]
    if "CidrIpv6" in rule:
        made["Ipv6Ranges"] = [{"CidrIpv6": rule["CidrIpv6"], **note}]
    other = rule.get("SourceSecurityGroupId") or rule.get("DestinationSecurityGroupId")
    if other:
        made["UserIdGroupPairs"] = [{"GroupId": other, **note}]
    prefixes = rule.get("SourcePrefixListId") or rule.get("DestinationPrefixListId")
    if prefixes:
        made["PrefixListIds"] = [{"PrefixListId": prefixes, **note}]
    return made


_delete_unused_group = deletes("ec2", "delete_security_group", by="GroupId")


def _delete_group(request: HandlerRequest) -> None:
    """Delete a group; as CloudFormation does, try again while an instance in it shuts down."""
    give_up_at = time.monotonic() + _IN_USE_SECONDS
    while True:
        try:
            return _delete_unused_group(request)
        except ClientError as error:
            is_in_use = error.response["Error"]["Code"] == "DependencyViolation"
            if not is_in_use or time.monotonic() > give_up_at:
                raise
        time.sleep(_POLL_SECONDS)


def _named_after_its_calls(
    name: str,
    *attributes: str,
    configure: Callable[[HandlerRequest], None] = _retag,
    update: Callable[[HandlerRequest], Provisioned] | None = None,
    **irregular: str,
) -> ResourceType:
    """Make a type whose calls follow EC2's rule: create_vpc, delete_vpc, describe_vpcs, VpcId.

    `irregular` overrides EC2's word in tag specifications (`tag`), the id's attribute (`id`), and
    the call that deletes and its argument (`delete` and `by`).
    """
    call_name, key = xform_name(name), f"{name}Id"
    return ResourceType(
        create=creates(
            "ec2",
            f"create_{call_name}",
            tag_kind=irregular.get("tag", call_name.replace("_", "-")),
            answer=name,
            by=key,
            attributes={irregular.get("id", key): key, **{each: each for each in attributes}},
        ),
        configure=configure,
        update=update,
        delete=deletes(
            "ec2", irregular.get("delete", f"delete_{call_name}"), by=irregular.get("by", key)
        ),
        exists=finds(
            "ec2", f"describe_{call_name}s", by=f"{key}s", answer=f"{name}s", where=_is_not_deleted
        ),
    )


TYPES: Registry = {
    "AWS::EC2::VPC": _named_after_its_calls("Vpc", "CidrBlock", configure=_configure_vpc),
    "AWS::EC2::Subnet": _named_after_its_calls(
        "Subnet", "VpcId", "CidrBlock", "AvailabilityZone", configure=_configure_subnet
    ),
    "AWS::EC2::RouteTable": _named_after_its_calls("RouteTable"),
    "AWS::EC2::InternetGateway": _named_after_its_calls("InternetGateway"),
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
    "AWS::EC2::EIP": ResourceType(
        create=creates(
            "ec2",
            "allocate_address",
            tag_kind="elastic-ip",
            by="PublicIp",
            attributes=["AllocationId", "PublicIp"],
        ),
        delete=lambda request: request.client("ec2").release_address(
            AllocationId=request.attributes["AllocationId"]
        ),
        exists=finds("ec2", "describe_addresses", by="PublicIps", answer="Addresses"),
    ),
    "AWS::EC2::NatGateway": _named_after_its_calls("NatGateway", tag="natgateway"),
    "AWS::EC2::VPCGatewayAttachment": ResourceType(
        create=_attach_gateway,
        delete=deletes("ec2", "detach_internet_gateway", "InternetGatewayId", "VpcId"),
        exists=finds(
            "ec2", "describe_internet_gateways", answer="InternetGateways", where=_is_attached
        ),
    ),
    "AWS::EC2::VPCEndpoint": _named_after_its_calls(
        "VpcEndpoint",
        update=_update_endpoint,
        id="Id",
        delete="delete_vpc_endpoints",
        by="VpcEndpointIds",
    ),
    "AWS::EC2::FlowLog": ResourceType(
        create=creates(
            "ec2",
            "create_flow_logs",
            tag_kind="vpc-flow-log",
            by="FlowLogIds",
            attributes={"Id": "FlowLogIds"},
            more=lambda request: {"ResourceIds": [request.properties["ResourceId"]]},
        ),
        configure=_retag,
        delete=deletes("ec2", "delete_flow_logs", by="FlowLogIds"),
        exists=finds("ec2", "describe_flow_logs", by="FlowLogIds", answer="FlowLogs"),
    ),
    "AWS::EC2::SecurityGroup": ResourceType(
        create=creates(
            "ec2",
            "create_security_group",
            name="GroupName",
            longest=255,
            tag_kind="security-group",
            by="GroupId",
            attributes={"GroupId": "GroupId", "Id": "GroupId"},
            more=lambda request: {"Description": request.properties["GroupDescription"]},
        ),
        configure=_configure_group,
        delete=_delete_group,
        exists=finds("ec2", "describe_security_groups", by="GroupIds"),
    ),
}
