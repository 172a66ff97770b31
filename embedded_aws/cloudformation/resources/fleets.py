"""EC2's launch templates, and the Spot fleets and groups that start instances from them."""

import json
import time
from dataclasses import replace
from typing import Any

from embedded_aws.cloudformation.errors import ResourceFailed
from embedded_aws.cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from embedded_aws.cloudformation.resources.calls import call, deletes, finds, look_up, retag

MODIFIABLE = ("TargetCapacity", "OnDemandTargetCapacity", "LaunchTemplateConfigs",
              "ExcessCapacityTerminationPolicy")  # fmt: skip

_SIZES = ("MinSize", "MaxSize", "DesiredCapacity")
# As long as the handler of AWS::AutoScaling::AutoScalingGroup may take to create one (its schema).
GROUP_SECONDS, POLL_SECONDS = 6 * 3600.0, 0.2


def _create_template(request: HandlerRequest) -> Provisioned:
    name = request.get("LaunchTemplateName") or request.generated_name(longest=128)
    made = call(request, "ec2", "create_launch_template", LaunchTemplateName=name)
    return _template(made["LaunchTemplate"])


def _update_template(request: HandlerRequest) -> Provisioned:
    """Create a new version; the default version stays, as on AWS."""
    ec2, name = request.client("ec2"), request.physical_id
    if request.changed("LaunchTemplateData") or request.changed("VersionDescription"):
        ec2.create_launch_template_version(
            LaunchTemplateId=name, **request.pick("LaunchTemplateData", "VersionDescription")
        )
    new, old = (
        {"Tags": [tag for each in of.get("TagSpecifications", []) for tag in each["Tags"]]}
        for of in (request.properties, request.old)
    )
    tagged = replace(request, properties=new, old=old)
    retag(tagged, "ec2", "create_tags", "delete_tags", Resources=[name])
    return _template(ec2.describe_launch_templates(LaunchTemplateIds=[name])["LaunchTemplates"][0])


def _template(made: dict[str, Any]) -> Provisioned:
    names = ("LaunchTemplateId", "LatestVersionNumber", "DefaultVersionNumber")
    return Provisioned(
        id=made["LaunchTemplateId"], attributes={name: str(made[name]) for name in names}
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


def _create_group(request: HandlerRequest) -> Provisioned:
    name = request.get("AutoScalingGroupName") or request.generated_name(longest=255)
    more = _group_arguments(request, name)
    call(request, "autoscaling", "create_auto_scaling_group", AutoScalingGroupName=name, **more)
    found = look_up(
        request, "autoscaling", "describe_auto_scaling_groups", AutoScalingGroupNames=[name]
    )["AutoScalingGroups"]
    return Provisioned(id=name, attributes={"AutoScalingGroupARN": found[0]["AutoScalingGroupARN"]})


def _group_arguments(request: HandlerRequest, name: str) -> dict[str, Any]:
    """Return the arguments whose form differs from the property's."""
    of = {"ResourceId": name, "ResourceType": "auto-scaling-group"}
    return {
        "VPCZoneIdentifier": ",".join(request.get("VPCZoneIdentifier", [])),
        "Tags": [{**each, **of} for each in request.get("Tags", [])],
        **{key: int(request.properties[key]) for key in _SIZES if key in request.properties},
    }


def _configure_group(request: HandlerRequest) -> None:
    """Wait for the desired capacity: only then does CloudFormation take it for created."""
    _measure(request)
    end = time.monotonic() + GROUP_SECONDS
    while True:
        (group,) = _groups(request)
        ready = [each for each in group["Instances"] if each["LifecycleState"] == "InService"]
        if len(ready) >= group["DesiredCapacity"]:
            return
        if time.monotonic() > end:
            sizes = f"{len(ready)}/{group['MinSize']}/{group['DesiredCapacity']}"
            raise ResourceFailed(
                "Group did not stabilize. {current/minSize/group} group size = {" + sizes + "}."
            )
        time.sleep(POLL_SECONDS)


def _groups(request: HandlerRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = request.client("autoscaling").describe_auto_scaling_groups(
        AutoScalingGroupNames=[request.physical_id]
    )["AutoScalingGroups"]
    return found


def _measure(request: HandlerRequest) -> None:
    for each in request.get("MetricsCollection", []):
        request.client("autoscaling").enable_metrics_collection(
            AutoScalingGroupName=request.physical_id, **each
        )


def _update_group(request: HandlerRequest) -> Provisioned:
    """Send every property, and so the desired capacity, whatever it has become meanwhile."""
    name, client = request.physical_id, request.client("autoscaling")
    tags, more = "Tags", _group_arguments(request, name)
    new = more.pop(tags)
    keys = {each["Key"] for each in new}
    of = {"ResourceId": name, "ResourceType": "auto-scaling-group"}
    if gone := [each for each in request.old.get(tags, []) if each["Key"] not in keys]:
        client.delete_tags(Tags=[{"Key": each["Key"], **of} for each in gone])
    if new:
        client.create_or_update_tags(Tags=new)
    call(request, "autoscaling", "update_auto_scaling_group", AutoScalingGroupName=name, **more)
    _measure(request)
    return Provisioned(id=name, attributes=request.attributes)


def _delete_group(request: HandlerRequest) -> None:
    """Send the group to zero, wait for its machines, delete it."""
    client, which = request.client("autoscaling"), {"AutoScalingGroupName": request.physical_id}
    if _groups(request):
        client.update_auto_scaling_group(**which, MinSize=0, MaxSize=0, DesiredCapacity=0)
    while (left := _groups(request)) and left[0]["Instances"]:
        time.sleep(POLL_SECONDS)
    if left:
        client.delete_auto_scaling_group(**which)


TYPES: Registry = {
    "AWS::AutoScaling::AutoScalingGroup": ResourceType(
        create=_create_group,
        configure=_configure_group,
        update=_update_group,
        delete=_delete_group,
        exists=lambda request: bool(_groups(request)),
    ),
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
