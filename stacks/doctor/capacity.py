"""Checks that instances can start: size, zones, quotas, service-linked roles, image, Spot score."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from botocore.exceptions import ClientError

from contract.stack_names import image_of
from sizing import LEAST_FOR_SCORES, PRICE_REGION, PriceBook, catalogue
from stacks.data_key import SERVICE_LINKED_ROLES
from stacks.doctor.account import NETWORK, DeployTarget, Diagnosis, ok, problem, warning
from stacks.doctor.network import in_zones, zones_of_subnets
from stacks.guard.settings import answer_or_none
from stacks.parameters.checks import MIN_UBUNTU, ROOT_DEVICE_NAME

# On-demand quotas by the Spot quota of the same families (aws service-quotas list-service-quotas).
_ON_DEMAND_QUOTA = {
    "L-3819A6DF": "L-DB2E81BA",  # G and VT
    "L-7212CCBC": "L-417A185B",  # P
    "L-C4BD4855": "L-417A185B",
}
# GetSpotPlacementScores: from 1 (unlikely) to 10; below this, a run waits for its instance.
_LOW_SCORE = 4
# Spot prices move within days, and plans reckon with them.
_OLD_DAYS = 60


def size_is_offered(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that the region and the subnets' zones offer the size."""
    p, ec2 = target.parameters, target.client("ec2")
    offers = ec2.describe_instance_type_offerings(
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(p.sizes)}],
    )["InstanceTypeOfferings"]
    zones = {
        size: {each["Location"] for each in offers if each["InstanceType"] == size}
        for size in p.sizes
    }
    offered = sorted(zones[p.size])
    if not offered:
        others = [size for size in p.sizes if zones[size]]
        fix = f"export AWS_REGION={PRICE_REGION} AWS_DEFAULT_REGION={PRICE_REGION}"
        fix = f"{target.deploy()} -c size={others[0]}" if others else fix
        what = f"no zone of {target.region} offers {p.size}"
        yield problem(what=what, fix=fix)
        return
    if unsold := [size for size in p.sizes if not zones[size]]:
        less = "mix_gpus=false" if p.mix_gpus else "alternates_price_factor=1"
        what = f"the fleet asks for {', '.join(unsold)}, which no zone of {target.region} offers"
        yield problem(what=what, fix=f"{target.deploy()} -c {less}")
        return
    no_local_zones = [{"Name": "zone-type", "Values": ["availability-zone"]}]
    found = ec2.describe_availability_zones(Filters=no_local_zones)["AvailabilityZones"]
    available = sorted(each["ZoneName"] for each in found)
    used = zones_of_subnets(target, available)
    useless = [zone for zone in used if zone not in offered]
    better = in_zones(target, offered)
    what = f"{p.size} is offered in {', '.join(offered)}; the subnets are in {', '.join(used)}"
    is_too_few = not (p.vpc or p.zones or target.stack(NETWORK)) and len(used) < len(offered)
    if is_too_few and len(used) == 1:
        what += ", the only zone with a default subnet: NetworkStack takes two, unless -c zones="
        yield problem(what=what, fix=better)
    elif len(useless) == len(used):
        yield problem(what=what, fix=better)
    elif useless:
        what += f"; not offered in {', '.join(useless)}"
        yield warning(what=what, fix=better)
    elif is_too_few:
        what += "; Spot finds more in all of them; a later change must delete training stacks first"
        yield warning(what=what, fix=better)
    else:
        yield ok(what=what)


def quota_suffices(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that the vCPU quotas suffice for what the fleet may start."""
    p, instance = target.parameters, target.parameters.instance
    spot = p.target_capacity - p.on_demand_base
    codes = [("spot quota", instance.quota_code, spot)]
    # With a deadline, the Guard buys an on-demand instance when Spot may miss it.
    if p.on_demand_base or p.deadline_hours:
        code = _ON_DEMAND_QUOTA.get(instance.quota_code, "")
        codes.append(("on-demand quota", code, p.target_capacity))
    for name, code, capacity in codes:
        if code and capacity:
            yield replace(_quota(target, code, capacity), check=name)
        elif capacity:
            yield warning(what=f"the quota of {p.size} is unknown", check=name)
    others = {catalogue.find(size).quota_code for size in p.sizes} - {instance.quota_code, ""}
    for code in sorted(others) if spot else ():
        for line in _alternates_quota(target, code, spot):
            yield replace(line, check="spot quota")


def _quota(target: DeployTarget, code: str, capacity: int) -> Diagnosis:
    p, value = target.parameters, target.quota("ec2", code)
    needed = p.instance.vcpus * capacity
    used = _vcpus_in_use(target, code)
    what = f"{code} is {value:g} vCPUs; {capacity} x {p.size} needs {needed}"
    what += f", and other machines of the account use {used}" if used else ""
    # While a fleet is replaced, both the old and the new one run.
    fix = target.increase_quota("ec2", code, used + 2 * needed)
    if value < needed:
        return problem(what=what, fix=fix)
    if value < used + needed:
        return warning(what=f"{what}: the run waits for one of them to end", fix=fix)
    too_large = _too_large(target, p.instance.quota_code, capacity, value)
    if too_large:
        what += f"; too low for the alternates {', '.join(too_large)}"
        return warning(what=what, fix=fix)
    return ok(what=what)


def _alternates_quota(target: DeployTarget, code: str, capacity: int) -> Iterator[Diagnosis]:
    """Warn of alternates that exceed a quota other than the size's, such as P's for a G size."""
    value = target.quota("ec2", code)
    if too_large := _too_large(target, code, capacity, value):
        vcpus = max(catalogue.find(size).vcpus for size in too_large) * capacity
        yield warning(
            what=f"{code} is {value:g} vCPUs; too low for the alternates {', '.join(too_large)}",
            fix=target.increase_quota("ec2", code, _vcpus_in_use(target, code) + 2 * vcpus),
        )


def _too_large(target: DeployTarget, code: str, capacity: int, value: float) -> list[str]:
    """Return the sizes that count against the quota and exceed it."""
    sizes = map(catalogue.find, target.parameters.sizes)
    return [s.size for s in sizes if s.quota_code == code and s.vcpus * capacity > value]


def _vcpus_in_use(target: DeployTarget, code: str) -> int:
    """Return the vCPUs of the machines of other stacks that count against a quota."""
    live = {"Name": "instance-state-name", "Values": ["pending", "running"]}
    pages = target.client("ec2").get_paginator("describe_instances").paginate(Filters=[live])
    used = 0
    for each in pages.search("Reservations[].Instances[]"):
        size = catalogue.instances().get(each["InstanceType"])
        tags = {tag["Key"]: tag["Value"] for tag in each.get("Tags", [])}
        if size is None or tags.get("Stack") == target.parameters.stack_name:
            continue
        spot = size.quota_code
        is_spot = each.get("InstanceLifecycle") == "spot"
        used += size.vcpus * (code == (spot if is_spot else _ON_DEMAND_QUOTA.get(spot)))
    return used


def service_roles_exist(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check for the service-linked roles, which the stack does not create (one per account)."""
    for role in SERVICE_LINKED_ROLES[target.parameters.fleet]:
        service = role.partition("/")[0]
        prefix = f"/aws-service-role/{service}/"
        roles = target.client("iam").list_roles(PathPrefix=prefix)["Roles"]
        if roles:
            yield ok(what=f"{roles[0]['RoleName']} exists")
        else:
            yield problem(
                what=f"none for {service}: the fleet needs it to start and terminate instances",
                fix=f"aws iam create-service-linked-role --aws-service-name {service}",
            )


def image_resolves(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that the image which a deploy starts is the run's, exists and fits the root volume."""
    p = target.parameters
    newest = _newest_image(target)
    image_id = image_of(target.stack(p.image_stack) or {}) if p.image_stack else ""
    image_id = image_id or newest
    if not image_id:
        what = f"{target.region} has no parameter {p.pytorch_ami_parameter}"
        yield problem(what=what, fix=_list_images(target))
        return
    # Filters, not ImageIds: an unknown id then gives an empty result, not an error.
    by_id = {"Name": "image-id", "Values": [image_id]}
    found = target.client("ec2").describe_images(Filters=[by_id])["Images"]
    if not found or found[0].get("State") != "available":
        what = f"the image {image_id} is not available in {target.region}"
        take = f"{target.deploy()} -c pytorch_ami_parameter={newest}"
        is_newer = newest not in ("", image_id)
        yield problem(what=what, fix=take if is_newer else _list_images(target))
        return
    (image,) = found
    sizes = [
        each.get("Ebs", {}).get("VolumeSize", 0)
        for each in image["BlockDeviceMappings"]
        if each["DeviceName"] == image.get("RootDeviceName")
    ]
    what = f"{image_id}: {image.get('Name', '-')}"
    fault = _cannot_boot(image) or _leaves_out(image, p.instance.family)
    if fault:
        what = f"{what}; {fault}"
        yield problem(what=what, fix=_list_images(target))
    elif sizes and sizes[0] > p.root_volume.gib:
        yield problem(
            what=f"{what}; its root has {sizes[0]} GiB, root_volume.gib is {p.root_volume.gib}",
            fix=f"{target.deploy()} -c root_volume.gib={sizes[0]}",
        )
    else:
        yield _image_of_run(target, what, image_id, newest)


def _newest_image(target: DeployTarget) -> str:
    """Return the image that the parameter names, empty if there is none; or the given image."""
    name = target.parameters.pytorch_ami_parameter
    if not name.startswith("/"):
        return name
    found = answer_or_none(target.client("ssm").get_parameter, "ParameterNotFound", Name=name)
    return str(found["Parameter"]["Value"]) if found else ""


def _image_of_run(target: DeployTarget, what: str, image_id: str, newest: str) -> Diagnosis:
    """Compare the image that a deploy starts with the deployed one, and with the newest."""
    p, command = target.parameters, f"{target.deploy()} -c pytorch_ami_parameter="
    deployed = image_of(target.stack(p.training) or {})
    uri = target.output(p.training, "RunUri") or ""
    if deployed not in ("", image_id) and uri.endswith(f"/{p.run_id}"):
        return warning(
            what=f"{what}; {p.run_id} is on {deployed}: the deploy ends its machine, and the run "
            "goes on with this image's torch and driver",
            fix=f"{command}{deployed}   # keeps its image",
        )
    if newest not in ("", image_id):
        fix = f"{command}{newest}   # takes the newest"
        return ok(what=f"{what}; {p.run_id} keeps it, the newest is {newest}", fix=fix)
    has = f"; {p.stack_name} has {deployed}" if deployed not in ("", image_id) else ""
    return ok(what=what + has)


def _cannot_boot(image: dict[str, Any]) -> str | None:
    """Return why an existing image would fail at boot; its parameter's name may not show it."""
    if (kind := image.get("Architecture", "x86_64")) != "x86_64":
        return f"it is for {kind}, and all sizes here are x86_64"
    root = image.get("RootDeviceName")
    if root != ROOT_DEVICE_NAME:
        return f"its root device is {root}, but the launch template's is {ROOT_DEVICE_NAME}"
    release = re.search(r"Ubuntu (\d+\.\d+)", image.get("Name", ""))
    if release and float(release[1]) < MIN_UBUNTU:
        return f"the Python of Ubuntu {release[1]} is too old; {MIN_UBUNTU} or newer is needed"
    return None


def _leaves_out(image: dict[str, Any], family: str) -> str | None:
    """Return that the image's own description names the families it supports, but not this one."""
    found = re.search(r"Supported EC2 instances: ([\w, -]+)", image.get("Description", ""))
    named = {each.strip().lower() for each in found[1].split(",")} if found else set()
    if not found or family in named or family.rstrip("d") in named:  # notes say P4 for P4d
        return None
    return f"it says that it supports {found[1].strip()}, not {family}"


def prices_are_new(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check the age of the prices with which the plan, max_usd and the Guard reckon."""
    p, book = target.parameters, PriceBook(region=target.region, assumes=True)
    on_demand, spot = book.require(p.size)
    age = max(on_demand.days_old, spot.days_old)
    what = f"{p.size}: ${on_demand.usd_per_hour:g} an hour, ${spot.usd_per_hour:g} on Spot "
    what += f"({spot.basis}), {age} days old"
    if age <= _OLD_DAYS:
        yield ok(what=what)
        return
    what += "; set max_usd by today's, which this shows (an upgrade renews the stacks' own)"
    fix = f"python -m sizing catalogue {p.size} --refresh --region {target.region}"
    yield warning(what=what, fix=fix)


def _list_images(target: DeployTarget) -> str:
    folder = re.sub(r"/[^/]+/latest/ami-id$", "", target.parameters.pytorch_ami_parameter)
    folder = folder if folder.startswith("/") else "/aws/service/deeplearning/ami/x86_64"
    return (
        f"aws ssm get-parameters-by-path --recursive --path {folder} --region {target.region} "
        "--query 'Parameters[].Name' --output text"
    )


def fleet_may_be_requested(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check by a dry run that no policy of the organization denies creating the fleet."""
    if target.parameters.fleet == "asg":
        yield ok(what="not asked: CreateAutoScalingGroup has no dry run; CloudFormation makes it")
        return
    identity = target.client("sts").get_caller_identity()
    partition, number = identity["Arn"].split(":")[1], identity["Account"]
    image = "ami-0123456789abcdef0"  # a dry run checks only permissions
    config = {
        "IamFleetRole": f"arn:{partition}:iam::{number}:role/aws-ec2-spot-fleet-tagging-role",
        "TargetCapacity": 1,
        "LaunchSpecifications": [{"ImageId": image, "InstanceType": target.parameters.size}],
    }
    code = message = ""
    try:
        target.client("ec2").request_spot_fleet(DryRun=True, SpotFleetRequestConfig=config)
    except ClientError as error:
        code, message = error.response["Error"]["Code"], error.response["Error"]["Message"]
        if code not in ("DryRunOperation", "UnauthorizedOperation"):
            raise
    if code == "DryRunOperation":
        yield ok(what="RequestSpotFleet would succeed (dry run)")
    elif "service control policy" in message:
        yield problem(
            what="a service control policy denies RequestSpotFleet, as Control Tower's control "
            "CT.EC2.PV.6 does: no credentials of this account can deploy one; Auto Scaling groups "
            "take its place (docs/fleets.md)",
            fix=f"{target.deploy()} -c fleet=asg",
        )
    elif "identity-based policy" in message:
        # A service control policy's denial would be named first.
        yield ok(what="denied to these credentials alone; CloudFormation makes the call")
    else:
        yield warning(
            what=f"cannot tell who denies RequestSpotFleet: {message}",
            fix="aws sts decode-authorization-message --encoded-message MESSAGE",
        )


def capacity_is_likely(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check EC2's Spot placement score: an estimate, not a guarantee."""
    p, ec2 = target.parameters, target.client("ec2")
    if p.target_capacity == p.on_demand_base:
        return
    if len(p.sizes) < LEAST_FOR_SCORES:
        what = f"not asked: EC2 rates fewer than {LEAST_FOR_SCORES} sizes low in any zone, and the "
        yield ok(what=f"{what}fleet may start {' '.join(p.sizes)}; mix_gpus=true adds sizes")
        return
    scores = ec2.get_spot_placement_scores(
        InstanceTypes=list(p.sizes),
        TargetCapacity=p.target_capacity,
        SingleAvailabilityZone=True,
        RegionNames=[target.region],
    )["SpotPlacementScores"]
    found = ec2.describe_availability_zones()["AvailabilityZones"]
    zones = {each["ZoneId"]: each["ZoneName"] for each in found}
    named = {zones.get(each.get("AvailabilityZoneId", ""), "?"): each["Score"] for each in scores}
    used = zones_of_subnets(target, sorted(zones.values()))
    here = {zone: score for zone, score in named.items() if zone in used}
    best = sorted(named, key=lambda zone: (-named[zone], zone))
    shown = ", ".join(f"{zone} {named[zone]}" for zone in best[:6]) or "none returned"
    what = f"Spot placement score (1-10) of {' '.join(p.sizes)}: {shown}"
    if max(here.values(), default=0) >= _LOW_SCORE:
        yield ok(what=what)
        return
    fix = f"{target.deploy()} -c on_demand_base={p.target_capacity}"
    if best and named[best[0]] >= _LOW_SCORE:
        fix = in_zones(target, sorted(best[:2]))
    what += f"; low in the subnets' zones ({', '.join(used)})"
    yield warning(what=what, fix=fix)
