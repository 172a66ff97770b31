"""IAM roles, policies and instance profiles."""

import json
from collections.abc import Callable
from typing import Any

from cloudformation.resource import Provisioned, ResourceRequest, ResourceType, tag_map
from cloudformation.resources.lookups import finds, is_found


def _create_role(request: ResourceRequest) -> Provisioned:
    name = request.get("RoleName") or request.generated_name(longest=64)
    arguments = request.pick(
        "Path", "Description", "MaxSessionDuration", "PermissionsBoundary", "Tags"
    )
    document = json.dumps(request.properties["AssumeRolePolicyDocument"])
    made = request.client("iam").create_role(
        RoleName=name, AssumeRolePolicyDocument=document, **arguments
    )["Role"]
    return Provisioned(id=name, attributes={"Arn": made["Arn"], "RoleId": made["RoleId"]})


def _configure_role(request: ResourceRequest) -> None:
    iam, role = request.client("iam"), request.physical_id
    if request.old:
        document = json.dumps(request.properties["AssumeRolePolicyDocument"])
        iam.update_assume_role_policy(RoleName=role, PolicyDocument=document)
        iam.update_role(
            RoleName=role,
            Description=request.get("Description", ""),
            MaxSessionDuration=request.get("MaxSessionDuration", 3600),
        )
        _retag(iam.tag_role, iam.untag_role, request, RoleName=role)
    old, new = request.old.get("ManagedPolicyArns", []), request.get("ManagedPolicyArns", [])
    for arn in new:
        if arn not in old:
            _attach(iam, role, arn)
    for arn in old:
        if arn not in new:
            iam.detach_role_policy(RoleName=role, PolicyArn=arn)
    names = {policy["PolicyName"] for policy in request.get("Policies", [])}
    for policy in request.get("Policies", []):
        iam.put_role_policy(
            RoleName=role,
            PolicyName=policy["PolicyName"],
            PolicyDocument=json.dumps(policy["PolicyDocument"]),
        )
    for policy in request.old.get("Policies", []):
        if policy["PolicyName"] not in names:
            iam.delete_role_policy(RoleName=role, PolicyName=policy["PolicyName"])


def _attach(iam: Any, role: str, arn: str) -> None:
    iam.attach_role_policy(RoleName=role, PolicyArn=arn)


def _retag(
    tag: Callable[..., Any], untag: Callable[..., Any], request: ResourceRequest, **which: str
) -> None:
    old, new = tag_map(request.old.get("Tags")), tag_map(request.get("Tags"))
    if set(old) - set(new):
        untag(**which, TagKeys=sorted(set(old) - set(new)))
    if new and new != old:
        tag(**which, Tags=[{"Key": key, "Value": value} for key, value in new.items()])


def _delete_role(request: ResourceRequest) -> None:
    iam, role = request.client("iam"), request.physical_id
    for arn in request.get("ManagedPolicyArns", []):
        iam.detach_role_policy(RoleName=role, PolicyArn=arn)
    for policy in request.get("Policies", []):
        iam.delete_role_policy(RoleName=role, PolicyName=policy["PolicyName"])
    iam.delete_role(RoleName=role)


# AWS::IAM::Policy: one inline policy for every principal that it names.

_PRINCIPALS = {"Roles": ("role", "RoleName"), "Users": ("user", "UserName"),
               "Groups": ("group", "GroupName")}  # fmt: skip


def _create_policy(request: ResourceRequest) -> Provisioned:
    return Provisioned(id=request.generated_name(longest=128), attributes={})


def _configure_policy(request: ResourceRequest) -> None:
    iam, name = request.client("iam"), request.properties["PolicyName"]
    document = json.dumps(request.properties["PolicyDocument"])
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in request.get(key, []):
            getattr(iam, f"put_{kind}_policy")(
                **{argument: principal}, PolicyName=name, PolicyDocument=document
            )
    kept = request.properties
    if request.old.get("PolicyName", name) != name:
        kept = {}
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in request.old.get(key, []):
            if principal not in kept.get(key, []):
                getattr(iam, f"delete_{kind}_policy")(
                    **{argument: principal}, PolicyName=request.old["PolicyName"]
                )


def _delete_policy(request: ResourceRequest) -> None:
    iam, name = request.client("iam"), request.properties["PolicyName"]
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in request.get(key, []):
            if _has_policy(iam, kind, argument, principal, name):
                getattr(iam, f"delete_{kind}_policy")(**{argument: principal}, PolicyName=name)


def _policy_exists(request: ResourceRequest) -> bool:
    iam, name = request.client("iam"), request.properties["PolicyName"]
    return all(
        _has_policy(iam, kind, argument, principal, name)
        for key, (kind, argument) in _PRINCIPALS.items()
        for principal in request.get(key, [])
    )


def _has_policy(iam: Any, kind: str, argument: str, principal: str, name: str) -> bool:
    return is_found(getattr(iam, f"get_{kind}_policy"), **{argument: principal}, PolicyName=name)


# AWS::IAM::ManagedPolicy


def _create_managed_policy(request: ResourceRequest) -> Provisioned:
    name = request.get("ManagedPolicyName") or request.generated_name(longest=128)
    made = request.client("iam").create_policy(
        PolicyName=name,
        PolicyDocument=json.dumps(request.properties["PolicyDocument"]),
        **request.pick("Path", "Description"),
    )["Policy"]
    return Provisioned(
        id=made["Arn"], attributes={"PolicyArn": made["Arn"], "PolicyId": made["PolicyId"]}
    )


def _configure_managed_policy(request: ResourceRequest) -> None:
    iam, arn = request.client("iam"), request.physical_id
    if request.old and request.changed("PolicyDocument"):
        _drop_old_versions(iam, arn)
        document = json.dumps(request.properties["PolicyDocument"])
        iam.create_policy_version(PolicyArn=arn, PolicyDocument=document, SetAsDefault=True)
    for key, (kind, argument) in _PRINCIPALS.items():
        old, new = request.old.get(key, []), request.get(key, [])
        for principal in new:
            if principal not in old:
                getattr(iam, f"attach_{kind}_policy")(**{argument: principal}, PolicyArn=arn)
        for principal in old:
            if principal not in new:
                getattr(iam, f"detach_{kind}_policy")(**{argument: principal}, PolicyArn=arn)


def _drop_old_versions(iam: Any, arn: str) -> None:
    # IAM keeps at most five versions; the default one cannot be deleted.
    for version in iam.list_policy_versions(PolicyArn=arn)["Versions"]:
        if not version["IsDefaultVersion"]:
            iam.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])


def _delete_managed_policy(request: ResourceRequest) -> None:
    iam, arn = request.client("iam"), request.physical_id
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in request.get(key, []):
            getattr(iam, f"detach_{kind}_policy")(**{argument: principal}, PolicyArn=arn)
    _drop_old_versions(iam, arn)
    iam.delete_policy(PolicyArn=arn)


# AWS::IAM::InstanceProfile


def _create_profile(request: ResourceRequest) -> Provisioned:
    name = request.get("InstanceProfileName") or request.generated_name(longest=128)
    made = request.client("iam").create_instance_profile(
        InstanceProfileName=name, **request.pick("Path")
    )["InstanceProfile"]
    return Provisioned(id=name, attributes={"Arn": made["Arn"]})


def _configure_profile(request: ResourceRequest) -> None:
    iam, name = request.client("iam"), request.physical_id
    for role in request.old.get("Roles", []):
        if role not in request.get("Roles", []):
            iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role)
    for role in request.get("Roles", []):
        if role not in request.old.get("Roles", []):
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)


def _delete_profile(request: ResourceRequest) -> None:
    iam, name = request.client("iam"), request.physical_id
    for role in request.get("Roles", []):
        iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role)
    iam.delete_instance_profile(InstanceProfileName=name)


TYPES = {
    "AWS::IAM::Role": ResourceType(
        create=_create_role,
        configure=_configure_role,
        delete=_delete_role,
        exists=finds("iam", "get_role", "RoleName"),
    ),
    "AWS::IAM::Policy": ResourceType(
        create=_create_policy,
        configure=_configure_policy,
        delete=_delete_policy,
        exists=_policy_exists,
    ),
    "AWS::IAM::ManagedPolicy": ResourceType(
        create=_create_managed_policy,
        configure=_configure_managed_policy,
        delete=_delete_managed_policy,
        exists=finds("iam", "get_policy", "PolicyArn"),
    ),
    "AWS::IAM::InstanceProfile": ResourceType(
        create=_create_profile,
        configure=_configure_profile,
        delete=_delete_profile,
        exists=finds("iam", "get_instance_profile", "InstanceProfileName"),
    ),
}
