"""Launch templates and Spot fleets."""

import json
from typing import Any

from cloudformation.errors import ResourceFailed
from cloudformation.resource import Provisioned, Registry, ResourceRequest, ResourceType
from cloudformation.resources.lookups import deletes, look_up

USER_DATA_LIMIT = 16 * 1024


def _create_template(request: ResourceRequest) -> Provisioned:
    name = request.get("LaunchTemplateName") or request.generated_name(longest=128)
    made = request.client("ec2").create_launch_template(
        LaunchTemplateName=name,
        LaunchTemplateData=_data(request),
        **request.pick("VersionDescription", "TagSpecifications"),
    )["LaunchTemplate"]
    return _template(made["LaunchTemplateId"], made)


def _update_template(request: ResourceRequest) -> Provisioned:
    """Create a new version; the default version stays, as on AWS."""
    ec2, name = request.client("ec2"), request.physical_id
    if request.changed("LaunchTemplateData") or request.changed("VersionDescription"):
        ec2.create_launch_template_version(
            LaunchTemplateId=name,
            LaunchTemplateData=_data(request),
            **request.pick("VersionDescription"),
        )
    made = ec2.describe_launch_templates(LaunchTemplateIds=[name])["LaunchTemplates"][0]
    return _template(name, made)


def _template(name: str, made: dict[str, Any]) -> Provisioned:
    return Provisioned(
        id=name,
        attributes={
            "LaunchTemplateId": name,
            "LatestVersionNumber": str(made["LatestVersionNumber"]),
            "DefaultVersionNumber": str(made["DefaultVersionNumber"]),
        },
    )


def _data(request: ResourceRequest) -> dict[str, Any]:
    data = dict(request.properties["LaunchTemplateData"])
    # EC2 counts the raw bytes: base64 turns three into four characters.
    size = len(data.get("UserData", "")) * 3 // 4
    if size > USER_DATA_LIMIT:
        raise ResourceFailed(
            f"User data is limited to {USER_DATA_LIMIT} bytes before base64 encoding, got {size}"
        )
    return data


def _template_exists(request: ResourceRequest) -> bool:
    found = look_up(
        request.client("ec2").describe_launch_templates, LaunchTemplateIds=[request.physical_id]
    )
    return bool(found and found["LaunchTemplates"])


def _create_fleet(request: ResourceRequest) -> Provisioned:
    config = dict(request.properties["SpotFleetRequestConfigData"])
    _check_versions(config)
    _check_role(request, config["IamFleetRole"])
    # CloudFormation writes the policy with a capital, the API without.
    if "ExcessCapacityTerminationPolicy" in config:
        policy = config["ExcessCapacityTerminationPolicy"]
        config["ExcessCapacityTerminationPolicy"] = policy[0].lower() + policy[1:]
    made = request.client("ec2").request_spot_fleet(SpotFleetRequestConfig=config)
    return Provisioned(id=made["SpotFleetRequestId"], attributes={"Id": made["SpotFleetRequestId"]})


def _check_versions(config: dict[str, Any]) -> None:
    for item in config.get("LaunchTemplateConfigs", []):
        version = item["LaunchTemplateSpecification"].get("Version", "")
        if not version.isdigit():
            raise ResourceFailed(
                f"Launch template version must be a number in a Spot fleet, got {version!r}"
            )


def _check_role(request: ResourceRequest, arn: str) -> None:
    role = look_up(request.client("iam").get_role, RoleName=arn.rpartition("/")[2])
    trusted = json.dumps(role["Role"]["AssumeRolePolicyDocument"]) if role else ""
    if "spotfleet.amazonaws.com" not in trusted:
        raise ResourceFailed(
            "Parameter: SpotFleetRequestConfig.IamFleetRole is invalid: "
            f"{arn} does not exist or does not trust spotfleet.amazonaws.com"
        )


_MODIFIABLE = ("TargetCapacity", "OnDemandTargetCapacity", "LaunchTemplateConfigs",
               "ExcessCapacityTerminationPolicy")  # fmt: skip


def _update_fleet(request: ResourceRequest) -> Provisioned:
    config = request.properties["SpotFleetRequestConfigData"]
    _check_versions(config)
    changes = {name: config[name] for name in _MODIFIABLE if name in config}
    request.client("ec2").modify_spot_fleet_request(
        SpotFleetRequestId=request.physical_id, **changes
    )
    return Provisioned(id=request.physical_id, attributes=request.attributes)


def _delete_fleet(request: ResourceRequest) -> None:
    request.client("ec2").cancel_spot_fleet_requests(
        SpotFleetRequestIds=[request.physical_id], TerminateInstances=True
    )


def _fleet_exists(request: ResourceRequest) -> bool:
    found = look_up(
        request.client("ec2").describe_spot_fleet_requests,
        SpotFleetRequestIds=[request.physical_id],
    )
    fleets = found["SpotFleetRequestConfigs"] if found else []
    return any(item["SpotFleetRequestState"] == "active" for item in fleets)


TYPES: Registry = {
    "AWS::EC2::LaunchTemplate": ResourceType(
        create=_create_template,
        update=_update_template,
        delete=deletes("ec2", "delete_launch_template", "LaunchTemplateId"),
        exists=_template_exists,
        volatile=frozenset({"LatestVersionNumber"}),
    ),
    "AWS::EC2::SpotFleet": ResourceType(
        create=_create_fleet, update=_update_fleet, delete=_delete_fleet, exists=_fleet_exists
    ),
}
