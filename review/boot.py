"""What a machine needs in order to boot, and what of it a deploy takes away.

Both sides are judged by the same rules, and only what is new is told: a network outside the app
looks the same on both.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from embedded_aws import references
from review.assembly import Side, StackSide
from review.changes import Effect, exports_of, imports_of
from review.run_effects import read_run_env
from review.spelling import as_list, number, path_of

_EVERYWHERE = ("0.0.0.0/0", "::/0")
_ANY = {"IpProtocol": "-1", "CidrIp": _EVERYWHERE[0]}
# Ways out that need no public address.
_GATEWAYS = ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "VpcPeeringConnectionId")
_NEEDS = {
    "IamInstanceProfile": "without a role it can read nothing",
    "ImageId": "it has no image",
    "UserData": "nothing starts the training",
}


def find_unbootable(base: Side, head: Side) -> list[Effect]:
    """List what machines of head lack and those of base have, for each training stack."""
    return [
        Effect("boot", f"a new machine cannot boot: {why}", "keep what it had", "boot", name, path)
        for name in sorted(head.stacks.keys() & base.stacks.keys())
        for path, why in sorted({*_missing(head, name)} - {*_missing(base, name)})
    ]


def _missing(side: Side, name: str) -> Iterator[tuple[str, str]]:
    """Yield what a machine of a stack does not have: where, and why it needs it."""
    stack = side.stacks[name]
    for data in stack.launch_templates:
        lacks = [why for key, why in _NEEDS.items() if not data.get(key)]
        if (data.get("MetadataOptions") or {}).get("HttpEndpoint") == "disabled":
            lacks.append("without HttpEndpoint it has no credentials")
        if not read_run_env(stack):
            lacks.append("its boot script writes no run.env")
        cards = as_list(data.get("NetworkInterfaces"))
        groups = [data.get("SecurityGroupIds"), *(each.get("Groups") for each in cards)]
        named = _named(groups) & stack.resources.keys()
        rules = stack.of_type("AWS::EC2::SecurityGroupEgress")
        for group in named:  # one without a list lets everything out
            egress = stack.resources[group]["Properties"].get("SecurityGroupEgress", _ANY)
            rules += as_list(egress)
        if named and not any(map(_lets_https_out, rules)):
            lacks.append("its security group lets no HTTPS out")
        yield from (("LaunchTemplate", why) for why in lacks)
        given = {each.get("AssociatePublicIpAddress") for each in cards} - {None}
        for network, subnet in _subnets(side, stack):
            where = path_of(subnet, network.resources[subnet])
            own = network.resources[subnet]["Properties"].get("MapPublicIpOnLaunch")
            if not _leads_out(network, subnet, is_public=all(given) if given else bool(own)):
                yield "", f"in {where} it has neither a public address nor another way to AWS"


def _lets_https_out(rule: Mapping[str, Any]) -> bool:
    is_wide = any(rule.get(each) in _EVERYWHERE for each in ("CidrIp", "CidrIpv6"))
    is_in = number(rule.get("FromPort")) <= 443 <= number(rule.get("ToPort"), 65535)
    return is_wide and is_in and str(rule.get("IpProtocol")) in ("-1", "tcp", "6")


def _named(value: object) -> set[str]:
    return {name for name, _ in references(value)}


def _subnets(side: Side, user: StackSide) -> Iterator[tuple[StackSide, str]]:
    """Yield the subnets of the app that a stack names, each with the stack that it is in."""
    imported = {*imports_of(user.template)}
    for stack in side.stacks.values():
        named = [value for name, value in exports_of(stack).items() if name in imported]
        for name in _named([named, user.resources] if stack is user else named):
            if stack.resources.get(name, {}).get("Type") == "AWS::EC2::Subnet":
                yield stack, name


def _leads_out(network: StackSide, subnet: str, *, is_public: bool) -> bool:
    def joined(kind: str, key: str, names: set[str] | None, to: str) -> set[str]:
        found = network.of_type(f"AWS::EC2::{kind}")
        return {it for each in found if names is None or _named(each.get(key)) & names
                for it in _named(each.get(to))}  # fmt: skip

    tables = joined("SubnetRouteTableAssociation", "SubnetId", {subnet}, "RouteTableId")
    attached = joined("VPCGatewayAttachment", "", None, "InternetGatewayId")
    return any(
        any(map(route.get, _GATEWAYS)) or (is_public and _named(route.get("GatewayId")) & attached)
        for route in network.of_type("AWS::EC2::Route")
        if _named(route.get("RouteTableId")) & tables
        and route.get("DestinationCidrBlock") in _EVERYWHERE
    )
