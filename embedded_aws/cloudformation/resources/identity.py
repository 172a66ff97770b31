"""IAM roles, policies and instance profiles; KMS keys and their aliases."""

from typing import Any

from embedded_aws.cloudformation.errors import ResourceFailed
from embedded_aws.cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from embedded_aws.cloudformation.resources.calls import (
    call,
    creates,
    deletes,
    finds,
    look_up,
    retag,
)


def _configure_role(request: HandlerRequest) -> None:
    if request.old:
        role = request.physical_id
        document = request.properties["AssumeRolePolicyDocument"]
        call(request, "iam", "update_assume_role_policy", RoleName=role, PolicyDocument=document)
        request.client("iam").update_role(
            RoleName=role,
            Description=request.get("Description", ""),
            MaxSessionDuration=request.get("MaxSessionDuration", 3600),
        )
        retag(request, "iam", "tag_role", "untag_role", RoleName=role)
        if boundary := request.get("PermissionsBoundary"):
            which = {"RoleName": role, "PermissionsBoundary": boundary}
            request.client("iam").put_role_permissions_boundary(**which)
        elif request.changed("PermissionsBoundary"):
            request.client("iam").delete_role_permissions_boundary(RoleName=role)
    _set_role_policies(request)


def _set_role_policies(request: HandlerRequest) -> None:
    iam, role = request.client("iam"), request.physical_id
    for arn in request.added("ManagedPolicyArns"):
        iam.attach_role_policy(RoleName=role, PolicyArn=arn)
    for arn in request.removed("ManagedPolicyArns"):
        iam.detach_role_policy(RoleName=role, PolicyArn=arn)
    names = {policy["PolicyName"] for policy in request.get("Policies", [])}
    for policy in request.get("Policies", []):
        call(request, "iam", "put_role_policy", RoleName=role, **policy)
    for policy in request.old.get("Policies", []):
        if policy["PolicyName"] not in names:
            iam.delete_role_policy(RoleName=role, PolicyName=policy["PolicyName"])


def _delete_role(request: HandlerRequest) -> None:
    _set_role_policies(request.emptied())
    request.client("iam").delete_role(RoleName=request.physical_id)


def _refuse_users(request: HandlerRequest) -> None:
    if others := request.pick("Users", "Groups"):
        raise ResourceFailed(f"The embedded AWS has no policies for {' and '.join(others)}")


def _configure_policy(request: HandlerRequest) -> None:
    """Put one inline policy into every role that it lists."""
    _refuse_users(request)
    name, old_name = request.properties["PolicyName"], request.old.get("PolicyName")
    for role in request.get("Roles", []):
        call(request, "iam", "put_role_policy", RoleName=role)
    gone = request.removed("Roles") if old_name == name else request.old.get("Roles", [])
    for role in gone:
        request.client("iam").delete_role_policy(RoleName=role, PolicyName=old_name)


def _delete_policy(request: HandlerRequest) -> None:
    for role in request.get("Roles", []):
        if _has_policy(request, role):
            request.client("iam").delete_role_policy(RoleName=role, **request.pick("PolicyName"))


def _has_policy(request: HandlerRequest, role: str) -> bool:
    wanted: dict[str, Any] = request.pick("PolicyName")
    return look_up(request, "iam", "get_role_policy", RoleName=role, **wanted) is not None


def _configure_managed_policy(request: HandlerRequest) -> None:
    _refuse_users(request)
    iam, arn = request.client("iam"), request.physical_id
    if request.old and request.changed("PolicyDocument"):
        _drop_old_versions(request)
        call(request, "iam", "create_policy_version", PolicyArn=arn, SetAsDefault=True)
    for role in request.added("Roles"):
        iam.attach_role_policy(RoleName=role, PolicyArn=arn)
    for role in request.removed("Roles"):
        iam.detach_role_policy(RoleName=role, PolicyArn=arn)


def _drop_old_versions(request: HandlerRequest) -> None:
    # IAM keeps at most five versions; the default one cannot be deleted.
    iam, arn = request.client("iam"), request.physical_id
    for version in iam.list_policy_versions(PolicyArn=arn)["Versions"]:
        if not version["IsDefaultVersion"]:
            iam.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])


def _delete_managed_policy(request: HandlerRequest) -> None:
    for role in request.get("Roles", []):
        request.client("iam").detach_role_policy(RoleName=role, PolicyArn=request.physical_id)
    _drop_old_versions(request)
    request.client("iam").delete_policy(PolicyArn=request.physical_id)


def _set_roles(request: HandlerRequest) -> None:
    iam, name = request.client("iam"), request.physical_id
    for role in request.removed("Roles"):
        iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role)
    for role in request.added("Roles"):
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)


def _delete_profile(request: HandlerRequest) -> None:
    _set_roles(request.emptied())
    request.client("iam").delete_instance_profile(InstanceProfileName=request.physical_id)


def _key_arguments(request: HandlerRequest) -> dict[str, Any]:
    tags = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in request.get("Tags", [])]
    return {"Policy": request.get("KeyPolicy"), "Tags": tags}


def _configure_key(request: HandlerRequest) -> None:
    kms, key = request.client("kms"), request.physical_id
    if request.get("EnableKeyRotation"):
        kms.enable_key_rotation(KeyId=key)
    else:
        kms.disable_key_rotation(KeyId=key)
    if request.old and "KeyPolicy" in request.properties:
        policy = request.properties["KeyPolicy"]
        call(request, "kms", "put_key_policy", KeyId=key, PolicyName="default", Policy=policy)
    if request.old and "Description" in request.properties:
        call(request, "kms", "update_key_description", KeyId=key)
    if request.get("Enabled", True) != request.old.get("Enabled", True):
        (kms.enable_key if request.get("Enabled", True) else kms.disable_key)(KeyId=key)


TYPES: Registry = {
    "AWS::IAM::Role": ResourceType(
        create=creates(
            "iam", "create_role", name="RoleName", answer="Role", attributes=["Arn", "RoleId"]
        ),
        configure=_configure_role,
        delete=_delete_role,
        exists=finds("iam", "get_role", by="RoleName"),
    ),
    "AWS::IAM::Policy": ResourceType(
        create=lambda request: Provisioned(id=request.generated_name(longest=128)),
        configure=_configure_policy,
        delete=_delete_policy,
        exists=lambda request: all(_has_policy(request, role) for role in request.get("Roles", [])),
    ),
    "AWS::IAM::ManagedPolicy": ResourceType(
        create=creates(
            "iam",
            "create_policy",
            name="ManagedPolicyName",
            argument="PolicyName",
            longest=128,
            answer="Policy",
            by="Arn",
            attributes={"PolicyArn": "Arn", "PolicyId": "PolicyId"},
        ),
        configure=_configure_managed_policy,
        delete=_delete_managed_policy,
        exists=finds("iam", "get_policy", by="PolicyArn"),
    ),
    "AWS::IAM::InstanceProfile": ResourceType(
        create=creates(
            "iam",
            "create_instance_profile",
            name="InstanceProfileName",
            longest=128,
            answer="InstanceProfile",
            attributes=["Arn"],
        ),
        configure=_set_roles,
        delete=_delete_profile,
        exists=finds("iam", "get_instance_profile", by="InstanceProfileName"),
    ),
    "AWS::KMS::Key": ResourceType(
        create=creates(
            "kms",
            "create_key",
            answer="KeyMetadata",
            by="KeyId",
            attributes=["Arn", "KeyId"],
            more=_key_arguments,
        ),
        configure=_configure_key,
        delete=deletes("kms", "schedule_key_deletion", "PendingWindowInDays", by="KeyId"),
        exists=finds(
            "kms",
            "describe_key",
            by="KeyId",
            where=lambda _, found: found["KeyMetadata"]["KeyState"] != "PendingDeletion",
        ),
    ),
    "AWS::KMS::Alias": ResourceType(
        create=creates("kms", "create_alias", name="AliasName"),
        delete=deletes("kms", "delete_alias", by="AliasName"),
        exists=finds(
            "kms",
            "list_aliases",
            answer="Aliases",
            where=lambda request, alias: alias["AliasName"] == request.physical_id,
        ),
    ),
}
