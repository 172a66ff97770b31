"""IAM roles, policies and instance profiles."""

import json
from collections.abc import Callable
from typing import Any

from cloudformation.resource import Made, ResourceType, Wish, tag_map
from cloudformation.resources.asking import known


def _create_role(wish: Wish) -> Made:
    name = wish.get("RoleName") or wish.generated_name(longest=64)
    arguments = wish.pick(
        "Path", "Description", "MaxSessionDuration", "PermissionsBoundary", "Tags"
    )
    document = json.dumps(wish.properties["AssumeRolePolicyDocument"])
    made = wish.client("iam").create_role(
        RoleName=name, AssumeRolePolicyDocument=document, **arguments
    )["Role"]
    return Made(id=name, attributes={"Arn": made["Arn"], "RoleId": made["RoleId"]})


def _configure_role(wish: Wish) -> None:
    iam, role = wish.client("iam"), wish.physical_id
    if wish.old:
        document = json.dumps(wish.properties["AssumeRolePolicyDocument"])
        iam.update_assume_role_policy(RoleName=role, PolicyDocument=document)
        iam.update_role(
            RoleName=role,
            Description=wish.get("Description", ""),
            MaxSessionDuration=wish.get("MaxSessionDuration", 3600),
        )
        _retag(iam.tag_role, iam.untag_role, wish, RoleName=role)
    old, new = wish.old.get("ManagedPolicyArns", []), wish.get("ManagedPolicyArns", [])
    for arn in new:
        if arn not in old:
            _attach(iam, role, arn)
    for arn in old:
        if arn not in new:
            iam.detach_role_policy(RoleName=role, PolicyArn=arn)
    names = {policy["PolicyName"] for policy in wish.get("Policies", [])}
    for policy in wish.get("Policies", []):
        iam.put_role_policy(
            RoleName=role,
            PolicyName=policy["PolicyName"],
            PolicyDocument=json.dumps(policy["PolicyDocument"]),
        )
    for policy in wish.old.get("Policies", []):
        if policy["PolicyName"] not in names:
            iam.delete_role_policy(RoleName=role, PolicyName=policy["PolicyName"])


def _attach(iam: Any, role: str, arn: str) -> None:
    iam.attach_role_policy(RoleName=role, PolicyArn=arn)


def _retag(tag: Callable[..., Any], untag: Callable[..., Any], wish: Wish, **which: str) -> None:
    old, new = tag_map(wish.old.get("Tags")), tag_map(wish.get("Tags"))
    if set(old) - set(new):
        untag(**which, TagKeys=sorted(set(old) - set(new)))
    if new and new != old:
        tag(**which, Tags=[{"Key": key, "Value": value} for key, value in new.items()])


def _delete_role(wish: Wish) -> None:
    iam, role = wish.client("iam"), wish.physical_id
    for arn in wish.get("ManagedPolicyArns", []):
        iam.detach_role_policy(RoleName=role, PolicyArn=arn)
    for policy in wish.get("Policies", []):
        iam.delete_role_policy(RoleName=role, PolicyName=policy["PolicyName"])
    iam.delete_role(RoleName=role)


# AWS::IAM::Policy: one inline policy, put on every principal that it names.

_PRINCIPALS = {"Roles": ("role", "RoleName"), "Users": ("user", "UserName"),
               "Groups": ("group", "GroupName")}  # fmt: skip


def _create_policy(wish: Wish) -> Made:
    return Made(id=wish.generated_name(longest=128), attributes={})


def _configure_policy(wish: Wish) -> None:
    iam, name = wish.client("iam"), wish.properties["PolicyName"]
    document = json.dumps(wish.properties["PolicyDocument"])
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in wish.get(key, []):
            getattr(iam, f"put_{kind}_policy")(
                **{argument: principal}, PolicyName=name, PolicyDocument=document
            )
    kept = wish.properties
    if wish.old.get("PolicyName", name) != name:
        kept = {}
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in wish.old.get(key, []):
            if principal not in kept.get(key, []):
                getattr(iam, f"delete_{kind}_policy")(
                    **{argument: principal}, PolicyName=wish.old["PolicyName"]
                )


def _delete_policy(wish: Wish) -> None:
    iam, name = wish.client("iam"), wish.properties["PolicyName"]
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in wish.get(key, []):
            if _has_policy(iam, kind, argument, principal, name):
                getattr(iam, f"delete_{kind}_policy")(**{argument: principal}, PolicyName=name)


def _policy_exists(wish: Wish) -> bool:
    iam, name = wish.client("iam"), wish.properties["PolicyName"]
    return all(
        _has_policy(iam, kind, argument, principal, name)
        for key, (kind, argument) in _PRINCIPALS.items()
        for principal in wish.get(key, [])
    )


def _has_policy(iam: Any, kind: str, argument: str, principal: str, name: str) -> bool:
    return known(getattr(iam, f"get_{kind}_policy"), **{argument: principal}, PolicyName=name)


# AWS::IAM::ManagedPolicy


def _create_managed_policy(wish: Wish) -> Made:
    name = wish.get("ManagedPolicyName") or wish.generated_name(longest=128)
    made = wish.client("iam").create_policy(
        PolicyName=name,
        PolicyDocument=json.dumps(wish.properties["PolicyDocument"]),
        **wish.pick("Path", "Description"),
    )["Policy"]
    return Made(id=made["Arn"], attributes={"PolicyArn": made["Arn"], "PolicyId": made["PolicyId"]})


def _configure_managed_policy(wish: Wish) -> None:
    iam, arn = wish.client("iam"), wish.physical_id
    if wish.old and wish.changed("PolicyDocument"):
        _drop_old_versions(iam, arn)
        document = json.dumps(wish.properties["PolicyDocument"])
        iam.create_policy_version(PolicyArn=arn, PolicyDocument=document, SetAsDefault=True)
    for key, (kind, argument) in _PRINCIPALS.items():
        old, new = wish.old.get(key, []), wish.get(key, [])
        for principal in new:
            if principal not in old:
                getattr(iam, f"attach_{kind}_policy")(**{argument: principal}, PolicyArn=arn)
        for principal in old:
            if principal not in new:
                getattr(iam, f"detach_{kind}_policy")(**{argument: principal}, PolicyArn=arn)


def _drop_old_versions(iam: Any, arn: str) -> None:
    # IAM keeps five versions at most; the default one cannot be deleted.
    for version in iam.list_policy_versions(PolicyArn=arn)["Versions"]:
        if not version["IsDefaultVersion"]:
            iam.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])


def _delete_managed_policy(wish: Wish) -> None:
    iam, arn = wish.client("iam"), wish.physical_id
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in wish.get(key, []):
            getattr(iam, f"detach_{kind}_policy")(**{argument: principal}, PolicyArn=arn)
    _drop_old_versions(iam, arn)
    iam.delete_policy(PolicyArn=arn)


# AWS::IAM::InstanceProfile


def _create_profile(wish: Wish) -> Made:
    name = wish.get("InstanceProfileName") or wish.generated_name(longest=128)
    made = wish.client("iam").create_instance_profile(
        InstanceProfileName=name, **wish.pick("Path")
    )["InstanceProfile"]
    return Made(id=name, attributes={"Arn": made["Arn"]})


def _configure_profile(wish: Wish) -> None:
    iam, name = wish.client("iam"), wish.physical_id
    for role in wish.old.get("Roles", []):
        if role not in wish.get("Roles", []):
            iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role)
    for role in wish.get("Roles", []):
        if role not in wish.old.get("Roles", []):
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)


def _delete_profile(wish: Wish) -> None:
    iam, name = wish.client("iam"), wish.physical_id
    for role in wish.get("Roles", []):
        iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role)
    iam.delete_instance_profile(InstanceProfileName=name)


TYPES = {
    "AWS::IAM::Role": ResourceType(
        create=_create_role,
        configure=_configure_role,
        delete=_delete_role,
        exists=lambda wish: known(wish.client("iam").get_role, RoleName=wish.physical_id),
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
        exists=lambda wish: known(wish.client("iam").get_policy, PolicyArn=wish.physical_id),
    ),
    "AWS::IAM::InstanceProfile": ResourceType(
        create=_create_profile,
        configure=_configure_profile,
        delete=_delete_profile,
        exists=lambda wish: known(
            wish.client("iam").get_instance_profile, InstanceProfileName=wish.physical_id
        ),
    ),
}
