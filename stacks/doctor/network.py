"""Checks of the network: room for our own, or an existing one from which machines reach AWS."""

import json
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network
from typing import Any
from urllib.request import getproxies

from sizing import service_prices
from stacks.doctor.account import NETWORK, DeployTarget, Diagnosis, ok, problem, warning
from stacks.network import NUM_ZONES_BY_DEFAULT

# VPCs per region; five unless raised.
_VPC_QUOTA = "L-F678F1CE"
# Services machines call besides S3: to stop their fleet, send metrics, find it, open a shell.
# Not logs, which are in S3; not ec2messages, which the agent no longer needs (3.3.40.0).
INTERFACES = ("ec2", "monitoring", "ssm", "ssmmessages")

_OF_DOCKER = IPv4Network("172.17.0.0/16")


def zones_of_subnets(target: DeployTarget, available: Sequence[str]) -> list[str]:
    """Return the zones that machines may start in."""
    if target.parameters.vpc:
        return sorted({each["AvailabilityZone"] for each in _subnets(target)})
    if target.parameters.zones:
        return list(target.parameters.zones)
    # Else CloudFormation takes the first ones of Fn::GetAZs: if any zone has a default subnet, of
    # those that have. https://docs.aws.amazon.com/AWSCloudFormation/latest/TemplateReference/intrinsic-function-reference-getavailabilityzones.html
    own = [{"Name": "default-for-az", "Values": ["true"]}]
    found = target.client("ec2").describe_subnets(Filters=own)["Subnets"]
    default = {each["AvailabilityZone"] for each in found} or available
    return [each for each in available if each in default][:NUM_ZONES_BY_DEFAULT]


def in_zones(target: DeployTarget, zones: Sequence[str]) -> str:
    """Return the command that brings machines into `zones`."""
    p, named = target.parameters, ",".join(zones)
    if p.vpc:  # its subnets decide: these are to choose from
        return (
            f"aws ec2 describe-subnets --filters Name=vpc-id,Values={p.vpc} "
            f"Name=availability-zone,Values={named} --region {target.region} "
            "--query 'Subnets[].SubnetId'"
        )
    fix = f"{target.deploy()} -c zones={named}"
    if target.stack(NETWORK) and target.stack(p.training):
        # CloudFormation changes no subnet whose export a stack uses.
        return f"npx cdk destroy {p.training}{target.options} && {fix}"
    return fix


def network_can_be_used(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check the existing VPC if one is named, else that there is room for NetworkStack's."""
    if target.parameters.vpc:
        yield from _existing(target)
    elif not target.stack(NETWORK):
        yield _vpc_quota(target)


def public_access_is_allowed(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that VPC Block Public Access leaves machines their way out, unless by endpoints.

    https://docs.aws.amazon.com/vpc/latest/userguide/security-vpc-bpa.html
    """
    p, ec2 = target.parameters, target.client("ec2")
    options = ec2.describe_vpc_block_public_access_options()["VpcBlockPublicAccessOptions"]
    mode = options["InternetGatewayBlockMode"]
    is_public = not p.vpc or any(each["MapPublicIpOnLaunch"] for each in _subnets(target))
    if mode == "off" or (mode == "block-ingress" and not is_public):  # which leaves NAT
        return
    if p.vpc and len(_closed(target)) == len(p.subnets):  # endpoints have no gateway
        return
    outputs = (target.stack(NETWORK) or {}).get("Outputs") or []
    ours = [each["OutputValue"] for each in outputs if each["OutputValue"].startswith("vpc-")]
    vpc = p.vpc or "".join(ours[:1])
    needed = "allow-bidirectional" if is_public else "allow-egress"
    found = ec2.describe_vpc_block_public_access_exclusions()["VpcBlockPublicAccessExclusions"]
    modes = [
        each["InternetGatewayExclusionMode"]
        for each in found
        if each["ResourceArn"].endswith(f"/{vpc}") and each["State"].endswith("complete")
    ]
    if vpc and {needed, "allow-bidirectional"} & set(modes):
        yield ok(what=f"{vpc} is excluded from VPC Block Public Access ({mode})")
        return
    what = f"VPC Block Public Access ({mode}) keeps machines of {vpc or NETWORK} from AWS"
    fix = (
        f"aws ec2 create-vpc-block-public-access-exclusion --vpc-id {vpc} --region "
        f"{target.region} --internet-gateway-exclusion-mode {needed}"
    )
    if options.get("ExclusionsAllowed") == "not-allowed":
        what += ", and the organization allows no exclusion: use subnets with endpoints (-c vpc=)"
        fix = f"aws ec2 describe-vpcs --region {target.region}"
    elif not vpc:
        fix = f"{target.deploy(NETWORK)}   # then the doctor names it in the next command"
    yield problem(what=what, fix=fix)


def _vpc_quota(target: DeployTarget) -> Diagnosis:
    number = len(target.client("ec2").describe_vpcs()["Vpcs"])
    most = target.quota("vpc", _VPC_QUOTA)
    what = f"{number} of {most:g} VPCs are in use in {target.region}"
    if number < most:
        return ok(what=what)
    fix = target.increase_quota("vpc", _VPC_QUOTA, number + 2)
    return problem(what=f"{what}; -c vpc= uses one of them", fix=fix)


def _subnets(target: DeployTarget) -> list[dict[str, Any]]:
    ids = {"Name": "subnet-id", "Values": list(target.parameters.subnets)}
    return list(target.client("ec2").describe_subnets(Filters=[ids])["Subnets"])


def _existing(target: DeployTarget) -> Iterator[Diagnosis]:
    p = target.parameters
    subnets = [each for each in _subnets(target) if each["VpcId"] == p.vpc]
    strange = sorted(set(p.subnets) - {each["SubnetId"] for each in subnets})
    if strange:
        yield problem(
            what=f"{p.vpc} in {target.region} has no {', '.join(strange)}",
            fix=f"aws ec2 describe-subnets --filters Name=vpc-id,Values={p.vpc} "
            f"--region {target.region} --query 'Subnets[].SubnetId'",
        )
        return
    # Of each zone the subnet with the most free addresses.
    subnets.sort(key=lambda each: int(each["AvailableIpAddressCount"]))
    best = {each["AvailabilityZone"]: each["SubnetId"] for each in subnets}
    if p.fleet == "spot" and len(best) < len(subnets):
        what = f"{', '.join(p.subnets)} are in {', '.join(sorted(best))}: a Spot fleet takes only "
        fix = f"{target.deploy()} -c subnets={','.join(best.values())}"
        yield problem(what=f"{what}one subnet of each zone", fix=fix)
        return
    public = [each["SubnetId"] for each in subnets if each["MapPublicIpOnLaunch"]]
    for subnet in public:
        yield warning(
            what=f"{subnet} assigns public addresses, which max_usd does not count",
            fix=f"aws ec2 modify-subnet-attribute --subnet-id {subnet} "
            f"--no-map-public-ip-on-launch --region {target.region}",
        )
    closed = _closed(target)
    endpoints, blocks = _endpoints(target), _blocks(target)
    found = [
        *_names_that_do_not_resolve(target, needs_private=bool(closed)),
        *_gateway_of_s3(target, endpoints, is_closed=bool(closed)),
        *_interfaces(target, endpoints, blocks, closed),
        *_policies_of_their_own(target, endpoints),
        *_dockers_addresses(target, blocks),
    ]
    yield from found
    if not found and not public:
        way = "endpoints" if closed else "NAT"
        yield ok(what=f"{', '.join(p.subnets)} of {p.vpc} reach AWS by {way}, without an address")


def _route_tables(target: DeployTarget) -> dict[str, dict[str, Any]]:
    """Return each subnet's route table: its own, else the VPC's main one."""
    of_vpc = {"Name": "vpc-id", "Values": [target.parameters.vpc]}
    tables = target.client("ec2").describe_route_tables(Filters=[of_vpc])["RouteTables"]
    # The main one under True: no subnet is named by its association.
    of = {e.get("SubnetId", e.get("Main")): each for each in tables for e in each["Associations"]}
    return {subnet: of.get(subnet, of.get(True, {})) for subnet in target.parameters.subnets}


def _closed(target: DeployTarget) -> dict[str, str]:
    """Return the subnets from which machines reach no internet, each with what it has instead."""
    tables, found = _route_tables(target), dict[str, str]()
    for subnet in _subnets(target):
        name, is_public = subnet["SubnetId"], subnet["MapPublicIpOnLaunch"]
        out = {"DestinationCidrBlock": "0.0.0.0/0"}.items()
        route = next((each for each in tables[name].get("Routes", []) if out <= each.items()), None)
        if route is None:
            found[name] = "no default route"
        elif route.get("State") == "blackhole":
            found[name] = "a default route to a gateway that is gone"
        elif str(route.get("GatewayId", "")).startswith("igw-") and not is_public:
            found[name] = "a default route for public addresses, but assigns none"
    return found


def _names_that_do_not_resolve(target: DeployTarget, *, needs_private: bool) -> Iterator[Diagnosis]:
    """Check the VPC's DNS: AWS's resolver alone knows the private names of endpoints."""
    ec2, vpc, at = target.client("ec2"), target.parameters.vpc, f"--region {target.region}"
    for name in ("Support", "Hostnames") if needs_private else ("Support",):
        answer = ec2.describe_vpc_attribute(VpcId=vpc, Attribute=f"enableDns{name}")
        if not answer[f"EnableDns{name}"]["Value"]:
            yield problem(
                what=f"{vpc} has enableDns{name} off: AWS's names do not lead to its endpoints",
                fix=f"aws ec2 modify-vpc-attribute --vpc-id {vpc} --enable-dns-{name.lower()} {at}",
            )
    options = ec2.describe_vpcs(VpcIds=[vpc])["Vpcs"][0]["DhcpOptionsId"]
    if options == "default":
        return
    (found,) = ec2.describe_dhcp_options(DhcpOptionsIds=[options])["DhcpOptions"]
    given = {each["Key"]: each["Values"] for each in found["DhcpConfigurations"]}
    servers = [each["Value"] for each in given.get("domain-name-servers", [])]
    if "AmazonProvidedDNS" not in servers:
        who = f"has the DNS servers {', '.join(servers)}" if servers else "names no DNS server"
        yield (warning if servers else problem)(
            what=f"{options} of {vpc} {who}: machines find AWS only if theirs forward to "
            "AmazonProvidedDNS",
            fix=f"aws ec2 associate-dhcp-options --dhcp-options-id default --vpc-id {vpc} {at}   "
            "# changes the DNS of all machines there",
        )


def _endpoints(target: DeployTarget) -> list[dict[str, Any]]:
    of_vpc = {"Name": "vpc-id", "Values": [target.parameters.vpc]}
    return list(target.client("ec2").describe_vpc_endpoints(Filters=[of_vpc])["VpcEndpoints"])


def _blocks(target: DeployTarget) -> list[str]:
    found = target.client("ec2").describe_vpcs(VpcIds=[target.parameters.vpc])["Vpcs"][0]
    return [each["CidrBlock"] for each in found["CidrBlockAssociationSet"]]


def _dockers_addresses(target: DeployTarget, blocks: Sequence[str]) -> Iterator[Diagnosis]:
    """Warn of a VPC with the addresses that Docker, part of the image, takes for its bridge."""
    if any(IPv4Network(each).overlaps(_OF_DOCKER) for each in blocks):
        what = f"{target.parameters.vpc} has addresses of {_OF_DOCKER}, which Docker on the "
        what += "machines takes for its own: what is there, as the VPC's DNS server, may not be "
        what += "reached"
        yield warning(what=what, fix="take a VPC of other addresses, or an image without Docker")


def _policies_of_their_own(
    target: DeployTarget, endpoints: Sequence[Mapping[str, Any]]
) -> Iterator[Diagnosis]:
    """Warn of endpoints whose policy may shut the machines out: AWS's own lets all pass."""
    default = {"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*"}
    for each in endpoints:
        service = each["ServiceName"].removeprefix(f"com.amazonaws.{target.region}.")
        known = json.loads(each.get("PolicyDocument") or "{}").get("Statement", default)
        if service not in (*INTERFACES, "autoscaling", "s3") or known in (default, [default]):
            continue
        what = f"{each['VpcEndpointId']} ({service}) has a policy of its own, which the machines' "
        what += "calls must pass"
        what += ": to the buckets of datasets, runs and bootstrap" * (service == "s3")
        fix = f"aws ec2 describe-vpc-endpoints --region {target.region} --vpc-endpoint-ids "
        fix += f"{each['VpcEndpointId']} --query 'VpcEndpoints[].PolicyDocument' --output text"
        yield warning(what=what, fix=fix)


def _gateway_of_s3(
    target: DeployTarget, endpoints: Sequence[Mapping[str, Any]], *, is_closed: bool
) -> Iterator[Diagnosis]:
    """Check for S3's endpoint, which is free: NAT charges by the GB."""
    vpc, service = target.parameters.vpc, f"com.amazonaws.{target.region}.s3"
    needed = {table["RouteTableId"] for table in _route_tables(target).values()}
    of_s3 = [each for each in endpoints if each["ServiceName"] == service]
    joined = {table for each in of_s3 for table in each.get("RouteTableIds", [])}
    if needed <= joined or any(each.get("PrivateDnsEnabled") for each in of_s3):
        return
    what = f"{vpc} has no gateway endpoint of S3, which is free, in the subnets' route tables"
    what += "" if is_closed else ": NAT charges each GB of the dataset and the checkpoints"
    fix = (
        f"aws ec2 create-vpc-endpoint --vpc-id {vpc} --region {target.region} --service-name "
        f"{service} --route-table-ids {' '.join(sorted(needed - joined))}"
    )
    yield (problem if is_closed else warning)(what=what, fix=fix)


def _interfaces(
    target: DeployTarget,
    endpoints: Sequence[Mapping[str, Any]],
    blocks: Sequence[str],
    closed: Mapping[str, str],
) -> Iterator[Diagnosis]:
    """Check the interface endpoints: those there admit our machines, those needed are there.

    Where one has private DNS, calls of the whole VPC go to it, also where there is NAT.
    """
    ec2, vpc, at = target.client("ec2"), target.parameters.vpc, f"--region {target.region}"
    ranges = ",".join(f"{{CidrIp={each}}}" for each in blocks)
    admit = (
        f"aws ec2 authorize-security-group-ingress {at} --ip-permissions "
        f"'IpProtocol=tcp,FromPort=443,ToPort=443,IpRanges=[{ranges}]' --group-id "
    )
    prefix = f"com.amazonaws.{target.region}."
    there = {
        each["ServiceName"].removeprefix(prefix): [group["GroupId"] for group in each["Groups"]]
        for each in endpoints
        if each.get("PrivateDnsEnabled") and each["ServiceName"].startswith(prefix)
    }
    shut: dict[str, list[str]] = {}  # one group may be that of many endpoints
    needed = (*INTERFACES, *(("autoscaling",) if target.parameters.fleet == "asg" else ()))
    for name in sorted(there.keys() & {*needed, "s3"}):
        groups = ec2.describe_security_groups(GroupIds=there[name])["SecurityGroups"]
        admitted = [*_admitted(ec2, groups)]
        for each in _subnets(target):
            if not any(IPv4Network(each["CidrBlock"]).subnet_of(block) for block in admitted):
                shut.setdefault(there[name][0], []).append(name)
                break
    for group, names in shut.items():
        what = f"the endpoints of {', '.join(names)} in {vpc} do not admit the subnets to port 443"
        yield problem(what=what, fix=admit + group)
    missing = [name for name in needed if name not in there]
    if not closed or not missing:
        return
    # An endpoint takes one subnet of each zone; groups may have more.
    zones = {
        each["AvailabilityZone"]: each["SubnetId"]
        for each in _subnets(target)
        if each["SubnetId"] in closed
    }
    usd = service_prices.INTERFACE_ENDPOINT_USD_PER_HOUR * service_prices.HOURS_PER_MONTH
    proxy = getproxies().get("https")
    note = f"; machines do not use this shell's proxy {proxy}" if proxy else ""
    yield problem(
        what=f"{'; '.join(f'{each} has {why}' for each, why in closed.items())}, and there are no "
        f"endpoints of {', '.join(missing)}: NAT, or {len(missing)} endpoints in {len(zones)} "
        f"zones for about ${usd * len(missing) * len(zones):.0f} a month (list price in "
        "us-east-1, plus $0.01 per GB), which all machines of the VPC would use, also instead of "
        f"their NAT{note}",
        fix=f"group=$(aws ec2 create-security-group {at} --vpc-id {vpc} --group-name "
        f"endpoints-of-{vpc} --description 'HTTPS from the VPC' --query GroupId --output text) && "
        f"{admit}$group && for service in {' '.join(missing)}; do aws ec2 create-vpc-endpoint {at} "
        f"--vpc-id {vpc} --vpc-endpoint-type Interface --private-dns-enabled --security-group-ids "
        f"$group --subnet-ids {' '.join(zones.values())} --service-name {prefix}$service || break; "
        "done",
    )


def _admitted(ec2: Any, groups: Sequence[Mapping[str, Any]]) -> Iterator[IPv4Network]:
    """Yield the blocks of addresses from which groups admit HTTPS."""
    entries = ec2.get_paginator("get_managed_prefix_list_entries")
    for rule in (rule for group in groups for rule in group["IpPermissions"]):
        if rule["IpProtocol"] == "-1" or rule.get("FromPort", 0) <= 443 <= rule.get("ToPort", 0):
            blocks = [each["CidrIp"] for each in rule["IpRanges"]]
            for each in rule.get("PrefixListIds", ()):
                pages = entries.paginate(PrefixListId=each["PrefixListId"])
                blocks += pages.search("Entries[].Cidr")
            yield from (IPv4Network(each) for each in blocks if ":" not in each)
