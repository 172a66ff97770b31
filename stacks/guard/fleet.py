"""The stack's Spot fleet and the run's instances, as EC2 describes them."""

from typing import Any

from botocore.exceptions import ClientError

from stacks.guard.settings import Settings, client


def fleet_above_zero(settings: Settings) -> str | None:
    """Return the id of the fleet to stop; None if there is no fleet or it is at zero."""
    try:
        parameter = client("ssm").get_parameter(Name=settings.fleet_parameter)
        fleet_id: str = parameter["Parameter"]["Value"]
        fleets = client("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=[fleet_id])
    except ClientError as error:
        # While the stack is created or destroyed, one of the two does not exist.
        if error.response["Error"]["Code"] in (
            "ParameterNotFound",
            "InvalidSpotFleetRequestId.NotFound",
        ):
            return None
        raise
    for fleet in fleets["SpotFleetRequestConfigs"]:
        is_active = fleet["SpotFleetRequestState"] in ("submitted", "active", "modifying")
        if is_active and fleet["SpotFleetRequestConfig"]["TargetCapacity"] > 0:
            return fleet_id
    return None


def send_to_zero(fleet_id: str) -> None:
    """Ask the fleet for no instance, on Spot or on demand."""
    client("ec2").modify_spot_fleet_request(
        SpotFleetRequestId=fleet_id, TargetCapacity=0, OnDemandTargetCapacity=0
    )


def instances_of_run(settings: Settings) -> list[dict[str, Any]]:
    """Return the run's instances, including those that ended within the last hour."""
    mine = [
        {"Name": "tag:Stack", "Values": [settings.stack_name]},
        {"Name": "tag:RunId", "Values": [settings.run_id]},
    ]
    pages = client("ec2").get_paginator("describe_instances").paginate(Filters=mine)
    reservations = [each for page in pages for each in page["Reservations"]]
    return [instance for each in reservations for instance in each["Instances"]]


def is_of_stack(settings: Settings, instance_id: str) -> bool:
    """Return whether EC2 lists the instance with this stack's tag."""
    mine = [
        {"Name": "instance-id", "Values": [instance_id]},
        {"Name": "tag:Stack", "Values": [settings.stack_name]},
    ]
    return bool(client("ec2").describe_instances(Filters=mine)["Reservations"])
