"""EC2's launch templates, and the Spot fleets that start instances from them."""

import json
from typing import Any

from embedded_aws.cloudformation.errors import ResourceFailed
from embedded_aws.cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from embedded_aws.cloudformation.resources.calls import call, deletes, finds, look_up

USER_DATA_LIMIT = 16 * 1024
MODIFIABLE = ("TargetCapacity", "OnDemandTargetCapacity", "LaunchTemplateConfigs",
              "ExcessCapacityTerminationPolicy")  # fmt: skip


def _create_template(request: HandlerRequest) -> Provisioned:
    name = request.get("LaunchTemplateName") or request.generated_name(longest=128)
    _check_user_data(request)
    made = call(request, "ec2", "create_launch_template", LaunchTemplateName=name)
    return _template(made["LaunchTemplate"])


def _update_template(request: HandlerRequest) -> Provisioned:
    """Create a new version; the default version stays, as on AWS."""
    ec2, name = request.client("ec2"), request.physical_id
    if request.changed("LaunchTemplateData") or request.changed("VersionDescription"):
        _check_user_data(request)
        ec2.create_launch_template_version(
            LaunchTemplateId=name, **request.pick("LaunchTemplateData", "VersionDescription")
        )
    return _template(ec2.describe_launch_templates(LaunchTemplateIds=[name])["LaunchTemplates"][0])


def _template(made: dict[str, Any]) -> Provisioned:
    names = ("LaunchTemplateId", "LatestVersionNumber", "DefaultVersionNumber")
    return Provisioned(
        id=made["LaunchTemplateId"], attributes={name: str(made[name]) for name in names}
    )


def _check_user_data(request: HandlerRequest) -> None:
    # EC2 counts the raw bytes: base64 turns three into four characters.
    size = len(request.properties["LaunchTemplateData"].get("UserData", "")) * 3 // 4
    if size > USER_DATA_LIMIT:
        raise ResourceFailed(
            f"User data is limited to {USER_DATA_LIMIT} bytes before base64 encoding, got {size}"
        )


def _create_fleet(request: HandlerRequest) -> Provisioned:
    config = dict(request.properties["SpotFleetRequestConfigData"])
    _check_versions(config)
    _check_role(request, config["IamFleetRole"])
    # CloudFormation capitalizes the policy; the API does not.
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


def _check_role(request: HandlerRequest, arn: str) -> None:
    role = look_up(request, "iam", "get_role", RoleName=arn.rpartition("/")[2])
    trusted = json.dumps(role["Role"]["AssumeRolePolicyDocument"]) if role else ""
    if "spotfleet.amazonaws.com" not in trusted:
        raise ResourceFailed(
            "Parameter: SpotFleetRequestConfig.IamFleetRole is invalid: "
            f"{arn} does not exist or does not trust spotfleet.amazonaws.com"
        )


def _update_fleet(request: HandlerRequest) -> Provisioned:
    config = request.properties["SpotFleetRequestConfigData"]
    _check_versions(config)
    changes = {name: config[name] for name in MODIFIABLE if name in config}
    request.client("ec2").modify_spot_fleet_request(
        SpotFleetRequestId=request.physical_id, **changes
    )
    return Provisioned(id=request.physical_id, attributes=request.attributes)


def _delete_fleet(request: HandlerRequest) -> None:
    request.client("ec2").cancel_spot_fleet_requests(
        SpotFleetRequestIds=[request.physical_id], TerminateInstances=True
    )


TYPES: Registry = {
    "AWS::EC2::LaunchTemplate": ResourceType(
        create=_create_template,
        update=_update_template,
        delete=deletes("ec2", "delete_launch_template", by="LaunchTemplateId"),
        exists=finds(
            "ec2", "describe_launch_templates", by="LaunchTemplateIds", answer="LaunchTemplates"
        ),
        volatile=frozenset({"LatestVersionNumber"}),
    ),
    "AWS::EC2::SpotFleet": ResourceType(
        create=_create_fleet,
        update=_update_fleet,
        delete=_delete_fleet,
        exists=finds(
            "ec2",
            "describe_spot_fleet_requests",
            by="SpotFleetRequestIds",
            answer="SpotFleetRequestConfigs",
            where=lambda _, fleet: fleet["SpotFleetRequestState"] == "active",
        ),
    ),
}
