"""Launch templates and Spot fleets."""

import json
from typing import Any

from cloudformation.errors import ResourceFailed
from cloudformation.resource import Made, Registry, ResourceType, Wish
from cloudformation.resources.asking import ask

USER_DATA_LIMIT = 16 * 1024


def _create_template(wish: Wish) -> Made:
    name = wish.get("LaunchTemplateName") or wish.generated_name(longest=128)
    made = wish.client("ec2").create_launch_template(
        LaunchTemplateName=name,
        LaunchTemplateData=_data(wish),
        **wish.pick("VersionDescription", "TagSpecifications"),
    )["LaunchTemplate"]
    return _template(made["LaunchTemplateId"], made)


def _update_template(wish: Wish) -> Made:
    """A change makes a new version; the default version stays, as on AWS."""
    ec2, name = wish.client("ec2"), wish.physical_id
    if wish.changed("LaunchTemplateData") or wish.changed("VersionDescription"):
        ec2.create_launch_template_version(
            LaunchTemplateId=name, LaunchTemplateData=_data(wish), **wish.pick("VersionDescription")
        )
    made = ec2.describe_launch_templates(LaunchTemplateIds=[name])["LaunchTemplates"][0]
    return _template(name, made)


def _template(name: str, made: dict[str, Any]) -> Made:
    return Made(
        id=name,
        attributes={
            "LaunchTemplateId": name,
            "LatestVersionNumber": str(made["LatestVersionNumber"]),
            "DefaultVersionNumber": str(made["DefaultVersionNumber"]),
        },
    )


def _data(wish: Wish) -> dict[str, Any]:
    data = dict(wish.properties["LaunchTemplateData"])
    # EC2 counts the raw bytes: base64 makes four characters of three.
    size = len(data.get("UserData", "")) * 3 // 4
    if size > USER_DATA_LIMIT:
        raise ResourceFailed(
            f"User data is limited to {USER_DATA_LIMIT} bytes before base64 encoding, got {size}"
        )
    return data


def _template_exists(wish: Wish) -> bool:
    found = ask(wish.client("ec2").describe_launch_templates, LaunchTemplateIds=[wish.physical_id])
    return bool(found and found["LaunchTemplates"])


def _create_fleet(wish: Wish) -> Made:
    config = dict(wish.properties["SpotFleetRequestConfigData"])
    _check_versions(config)
    _check_role(wish, config["IamFleetRole"])
    # CloudFormation writes the policy with a capital, the API without.
    if "ExcessCapacityTerminationPolicy" in config:
        policy = config["ExcessCapacityTerminationPolicy"]
        config["ExcessCapacityTerminationPolicy"] = policy[0].lower() + policy[1:]
    made = wish.client("ec2").request_spot_fleet(SpotFleetRequestConfig=config)
    return Made(id=made["SpotFleetRequestId"], attributes={"Id": made["SpotFleetRequestId"]})


def _check_versions(config: dict[str, Any]) -> None:
    for item in config.get("LaunchTemplateConfigs", []):
        version = item["LaunchTemplateSpecification"].get("Version", "")
        if not version.isdigit():
            raise ResourceFailed(
                f"Launch template version must be a number in a Spot fleet, got {version!r}"
            )


def _check_role(wish: Wish, arn: str) -> None:
    role = ask(wish.client("iam").get_role, RoleName=arn.rpartition("/")[2])
    trusted = json.dumps(role["Role"]["AssumeRolePolicyDocument"]) if role else ""
    if "spotfleet.amazonaws.com" not in trusted:
        raise ResourceFailed(
            "Parameter: SpotFleetRequestConfig.IamFleetRole is invalid: "
            f"{arn} does not exist or does not trust spotfleet.amazonaws.com"
        )


_MODIFIABLE = ("TargetCapacity", "OnDemandTargetCapacity", "LaunchTemplateConfigs",
               "ExcessCapacityTerminationPolicy")  # fmt: skip


def _update_fleet(wish: Wish) -> Made:
    config = wish.properties["SpotFleetRequestConfigData"]
    _check_versions(config)
    changes = {name: config[name] for name in _MODIFIABLE if name in config}
    wish.client("ec2").modify_spot_fleet_request(SpotFleetRequestId=wish.physical_id, **changes)
    return Made(id=wish.physical_id, attributes=wish.attributes)


def _delete_fleet(wish: Wish) -> None:
    wish.client("ec2").cancel_spot_fleet_requests(
        SpotFleetRequestIds=[wish.physical_id], TerminateInstances=True
    )


def _fleet_exists(wish: Wish) -> bool:
    found = ask(
        wish.client("ec2").describe_spot_fleet_requests, SpotFleetRequestIds=[wish.physical_id]
    )
    fleets = found["SpotFleetRequestConfigs"] if found else []
    return any(item["SpotFleetRequestState"] == "active" for item in fleets)


TYPES: Registry = {
    "AWS::EC2::LaunchTemplate": ResourceType(
        create=_create_template,
        update=_update_template,
        delete=lambda wish: wish.client("ec2").delete_launch_template(
            LaunchTemplateId=wish.physical_id
        ),
        exists=_template_exists,
        volatile=frozenset({"LatestVersionNumber"}),
    ),
    "AWS::EC2::SpotFleet": ResourceType(
        create=_create_fleet, update=_update_fleet, delete=_delete_fleet, exists=_fleet_exists
    ),
}
