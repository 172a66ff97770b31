"""What a machine needs in order to boot, and what of it a deploy takes away.

Both sides are judged by the same rules, and only what is new is told: a network outside the app
looks the same on both.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from embedded_aws import references
from review.assembly import Side, StackSide
from review.changes import Effect
from review.objections import exports_of, imports_of
from review.run_effects import read_run_env
from review.spelling import path_of, spell

_EVERYWHERE = ("0.0.0.0/0", "::/0")
# Ways out that need no public address, by the property of a route.
_GATEWAYS = ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "VpcPeeringConnectionId")
# Without such a way, a machine needs interface endpoints of these (docs/deploy.md).
_SERVICES = {"ec2", "monitoring", "ssm", "ssmmessages"}
_NEEDS = {
    "IamInstanceProfile": "without a role it can read nothing",
    "ImageId": "it has no image",
    "UserData": "nothing starts the training",
}
_Missing = Iterator[tuple[str, str]]


def find_unbootable(base: Side, head: Side) -> list[Effect]:
    """List what machines of head lack and those of base have, for each training stack."""
    found = []
    for name in head.stacks.keys() & base.stacks.keys():
        had = {why for _, why in _missing(base, name)}
        for path, why in dict.fromkeys(_missing(head, name)):
            if had and why in had:
                continue
            what = f"a new machine cannot boot: {why}"
            found.append(
                Effect(
                    kind="boot", stack=name, path=path, what=what, instead="keep it", accept="boot"
                )
            )
    return found


def _missing(side: Side, name: str) -> _Missing:
    """Yield what a machine of a stack does not have: where, and why it needs it."""
    stack = side.stacks[name]
    for data in stack.launch_templates:
        if (data.get("MetadataOptions") or {}).get("HttpEndpoint") == "disabled":
            yield "LaunchTemplate", "without HttpEndpoint it has no credentials"
        yield from (("LaunchTemplate", why) for key, why in _NEEDS.items() if not data.get(key))
        if not read_run_env(stack):
            yield "LaunchTemplate", "its boot script writes no run.env"
        cards = data.get("NetworkInterfaces") or []
        groups = [data.get("SecurityGroupIds"), *(each.get("Groups") for each in cards)]
        yield from _shut(stack, {name for name, _ in references(groups)} & stack.resources.keys())
        given = {each.get("AssociatePublicIpAddress") for each in cards} - {None}
        for network, subnet in _subnets(side, stack):
            resources = network.resources
            properties = resources[subnet].get("Properties") or {}
            is_public = given == {True} or (not given and properties.get("MapPublicIpOnLaunch"))
            if not _leads_out(network, subnet, is_public=bool(is_public)):
                where = path_of(subnet, resources[subnet])
                yield where, f"{where} gives it neither a public address nor another way to AWS"


def _shut(stack: StackSide, groups: set[str]) -> _Missing:
    rules = stack.of_type("AWS::EC2::SecurityGroupEgress")
    for name in groups:
        # A group without a list lets everything out.
        everything = [{"IpProtocol": "-1", "CidrIp": _EVERYWHERE[0]}]
        own = stack.resources[name].get("Properties") or {}
        rules += own.get("SecurityGroupEgress", everything)
    if groups and not any(map(_lets_https_out, rules)):
        yield "SecurityGroup", "its security group lets no HTTPS out"


def _lets_https_out(rule: Mapping[str, Any]) -> bool:
    is_wide = rule.get("CidrIp") in _EVERYWHERE or rule.get("CidrIpv6") in _EVERYWHERE
    ports = range(int(rule.get("FromPort", 0)), int(rule.get("ToPort", 65535)) + 1)
    is_https = str(rule.get("IpProtocol")) in ("-1", "tcp", "6") and 443 in ports
    return is_wide and (is_https or str(rule.get("IpProtocol")) == "-1")


def _subnets(side: Side, user: StackSide) -> Iterator[tuple[StackSide, str]]:
    """Yield the subnets of the app that a stack names, each with the stack that it is in."""
    imported = set(imports_of(user.template))
    for stack in side.stacks.values():
        named = [value for name, value in exports_of(stack.template).items() if name in imported]
        for name, _ in references([named, user.resources] if stack is user else named):
            if stack.resources.get(name, {}).get("Type") == "AWS::EC2::Subnet":
                yield stack, name


def _leads_out(network: StackSide, subnet: str, *, is_public: bool) -> bool:
    def named(properties: Mapping[str, Any], key: str) -> set[str]:
        return {name for name, _ in references(properties.get(key))}

    tables = {
        table
        for each in network.of_type("AWS::EC2::SubnetRouteTableAssociation")
        if subnet in named(each, "SubnetId")
        for table in named(each, "RouteTableId")
    }
    attached = {
        gateway
        for each in network.of_type("AWS::EC2::VPCGatewayAttachment")
        for gateway in named(each, "InternetGatewayId")
    }
    for route in network.of_type("AWS::EC2::Route"):
        if (
            named(route, "RouteTableId") & tables
            and route.get("DestinationCidrBlock") in _EVERYWHERE
        ):
            way = bool(named(route, "GatewayId") & attached) and is_public
            if way or any(route.get(each) for each in _GATEWAYS):
                return True
    endpoints = network.of_type("AWS::EC2::VPCEndpoint")
    names = {spell(each.get("ServiceName")).rpartition(".")[2] for each in endpoints}
    return names >= _SERVICES
