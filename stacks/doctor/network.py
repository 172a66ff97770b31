"""Checks of the network: room for our own, or an existing one from which machines reach AWS."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stacks.doctor.account import NETWORK, DeployTarget, Diagnosis, ok, problem, warning
from stacks.network import NUM_ZONES_BY_DEFAULT

# VPCs per region; five unless raised.
_VPC_QUOTA = "L-F678F1CE"
# Services machines call besides S3: to stop their fleet, send metrics, find it, open a shell.
# Not logs, which are in S3; not ec2messages, which the agent no longer needs (3.3.40.0).
INTERFACES = ("ec2", "monitoring", "ssm", "ssmmessages")


def zones_of_subnets(target: DeployTarget, available: Sequence[str]) -> list[str]:
    """Return the zones that machines may start in."""
    if target.parameters.vpc:
        return sorted({each["AvailabilityZone"] for each in _subnets(target)})
    # Without `zones` CloudFormation takes the first ones of Fn::GetAZs.
    return list(target.parameters.zones) or list(available[:NUM_ZONES_BY_DEFAULT])


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
    found: list[dict[str, Any]] = target.client("ec2").describe_subnets(Filters=[ids])["Subnets"]
    return found


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
    tables = _route_tables(target)
    closed = [
        each["SubnetId"]
        for each in subnets
        if each["SubnetId"] not in public and not _leads_out(tables[each["SubnetId"]])
    ]
    missing = list(_missing_endpoints(target, tables, closed))
    yield from missing
    if not missing and not public:
        way = "endpoints" if closed else "NAT"
        yield ok(what=f"{', '.join(p.subnets)} of {p.vpc} reach AWS by {way}, without an address")


def _route_tables(target: DeployTarget) -> dict[str, dict[str, Any]]:
    """Return each subnet's route table: its own, else the VPC's main one."""
    p = target.parameters
    of_vpc = {"Name": "vpc-id", "Values": [p.vpc]}
    tables = target.client("ec2").describe_route_tables(Filters=[of_vpc])["RouteTables"]
    main: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for table in tables:
        for association in table["Associations"]:
            if association.get("Main"):
                main = table
            elif "SubnetId" in association:
                own[association["SubnetId"]] = table
    return {subnet: own.get(subnet, main) for subnet in p.subnets}


def _leads_out(table: Mapping[str, Any]) -> bool:
    """Whether machines without a public address reach the internet, by NAT or another network."""
    return any(
        route.get("DestinationCidrBlock") == "0.0.0.0/0"
        and route.get("State") != "blackhole"
        and not str(route.get("GatewayId", "")).startswith("igw-")
        for route in table.get("Routes", [])
    )


def _missing_endpoints(
    target: DeployTarget, tables: Mapping[str, Mapping[str, Any]], closed: Sequence[str]
) -> Iterator[Diagnosis]:
    """Yield missing endpoints: S3's always, as NAT charges by the GB; others for closed subnets."""
    vpc = target.parameters.vpc
    of_vpc = {"Name": "vpc-id", "Values": [vpc]}
    found = target.client("ec2").describe_vpc_endpoints(Filters=[of_vpc])["VpcEndpoints"]
    service = f"com.amazonaws.{target.region}."
    create = f"aws ec2 create-vpc-endpoint --vpc-id {vpc} --region {target.region} --service-name "
    needed = {table["RouteTableId"] for table in tables.values()}
    of_s3 = [each for each in found if each["ServiceName"] == f"{service}s3"]
    joined = {table for each in of_s3 for table in each.get("RouteTableIds", [])}
    if not (needed <= joined or any(each.get("PrivateDnsEnabled") for each in of_s3)):
        state = problem if closed else warning
        what = f"{vpc} has no gateway endpoint of S3 in the subnets' route tables"
        what += "" if closed else ": NAT charges each GB of the dataset and the checkpoints"
        fix = f"{create}{service}s3 --route-table-ids {' '.join(sorted(needed))}"
        yield state(what=what, fix=fix)
    names = {each["ServiceName"] for each in found if each.get("PrivateDnsEnabled")}
    others = ("autoscaling",) if target.parameters.fleet == "asg" else ()
    for name in (*INTERFACES, *others) if closed else ():
        if service + name not in names:
            yield problem(
                what=f"{', '.join(closed)} have no way to {name}: neither NAT nor an endpoint",
                fix=f"{create}{service}{name} --vpc-endpoint-type Interface "
                f"--private-dns-enabled --subnet-ids {' '.join(closed)}",
            )
