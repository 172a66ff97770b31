"""Two zones, of which Spot leaves one at times: where fleets may look for machines.

Which zone a machine is in, EC2 says of it; the Guards of all runs share what they see of Spot, and
let pools rest that lost machines (stacks/guard/pools.py).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import CLOCK
from tests.stacks.guard.world import HOUR, USERS

if TYPE_CHECKING:
    from tests.simulation.world import Universe

ZONES: Mapping[str, str] = {"subnet-a": "us-east-1a", "subnet-b": "us-east-1b"}
_CALL_SECONDS = 180.0
_CLOSED = ("us-east-1a", "", "us-east-1b", "")  # in turn, for four hours each


def closed_zone() -> str:
    """Return the zone that has no Spot capacity now; empty: both have."""
    return _CLOSED[int(CLOCK.now // (4 * HOUR)) % len(_CLOSED)]


def open_pools(stack: "Universe", market: str) -> list[str]:
    """Return the zones in which a fleet may find a machine now."""
    offered = [ZONES[each] for each in stack.offered]
    return [each for each in offered if market == "on-demand" or each != closed_zone()]


def offer(stack: "Universe", request: Mapping[str, Any]) -> None:
    """Take what a fleet may look in; of groups, a machine elsewhere is ended by AWS."""
    if "VPCZoneIdentifier" in request:
        subnets = request["VPCZoneIdentifier"].split(",")
    else:
        overrides = request["LaunchTemplateConfigs"][0]["Overrides"]
        subnets = [each["SubnetId"] for each in overrides]
    stack.offered = tuple(dict.fromkeys(subnets))
    if not stack.offered or not {*stack.offered} <= {*ZONES}:
        stack.breaks("a fleet may look somewhere", f"in {subnets}")
    for machine in stack.live if "VPCZoneIdentifier" in request else ():
        zones = [ZONES[each] for each in stack.offered]
        if machine.market == "spot" and stack.zones[machine.id] not in zones:
            if CLOCK.now - machine.launched > _CALL_SECONDS:  # else it came while a call went on
                stack.breaks("no machine is ended so that a pool may rest", machine.id)
            stack.end(machine, USERS, saves=True)


def zoned(operation: str, answer: Any, worlds: list["Universe"]) -> Any:
    """Return EC2's answer with zones in it."""
    if operation == "describe_instances":
        zones = {name: zone for world in worlds for name, zone in world.zones.items()}
        for reservation in answer["Reservations"]:
            for one in reservation["Instances"]:
                place = {"AvailabilityZone": zones.get(one["InstanceId"], "us-east-1a")}
                one["Placement"] = place
    if operation == "describe_spot_price_history":
        found = answer["SpotPriceHistory"]
        answer = {"SpotPriceHistory": [
            {**each, "AvailabilityZone": zone} for each in found for zone in ZONES.values()
        ]}  # fmt: skip
    if operation == "describe_spot_fleet_requests":
        for fleet in answer["SpotFleetRequestConfigs"]:
            template = {"LaunchTemplateSpecification": {"LaunchTemplateId": "lt-1"}}
            fleet["SpotFleetRequestConfig"]["LaunchTemplateConfigs"] = [template]
    return answer


def subnets(names: list[str]) -> Any:
    """Return what EC2 says of subnets."""
    return {"Subnets": [{"SubnetId": each, "AvailabilityZone": ZONES[each]} for each in names]}
