"""IAM roles, policies and instance profiles."""

from typing import Any

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, creates, finds, look_up, retag


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


# AWS::IAM::Policy: one inline policy for every principal that it names.

_PRINCIPALS = {"Roles": ("role", "RoleName"), "Users": ("user", "UserName"),
               "Groups": ("group", "GroupName")}  # fmt: skip


def _configure_policy(request: HandlerRequest) -> None:
    name, old_name = request.properties["PolicyName"], request.old.get("PolicyName")
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in request.get(key, []):
            call(request, "iam", f"put_{kind}_policy", **{argument: principal})
    for key, (kind, argument) in _PRINCIPALS.items():
        gone = request.removed(key) if old_name == name else request.old.get(key, [])
        for principal in gone:
            delete = getattr(request.client("iam"), f"delete_{kind}_policy")
            delete(**{argument: principal}, PolicyName=old_name)


def _delete_policy(request: HandlerRequest) -> None:
    for kind, principal in _principals(request):
        if _has_policy(request, kind, principal):
            delete = getattr(request.client("iam"), f"delete_{kind}_policy")
            delete(**principal, **request.pick("PolicyName"))


def _principals(request: HandlerRequest) -> list[tuple[str, dict[str, str]]]:
    """Return the kind of each principal and the argument that names it."""
    return [
        (kind, {argument: principal})
        for key, (kind, argument) in _PRINCIPALS.items()
        for principal in request.get(key, [])
    ]


def _has_policy(request: HandlerRequest, kind: str, principal: dict[str, Any]) -> bool:
    name = request.properties["PolicyName"]
    found = look_up(request, "iam", f"get_{kind}_policy", **principal, PolicyName=name)
    return found is not None


# AWS::IAM::ManagedPolicy


def _configure_managed_policy(request: HandlerRequest) -> None:
    iam, arn = request.client("iam"), request.physical_id
    if request.old and request.changed("PolicyDocument"):
        _drop_old_versions(iam, arn)
        call(request, "iam", "create_policy_version", PolicyArn=arn, SetAsDefault=True)
    _attach_principals(request)


def _attach_principals(request: HandlerRequest) -> None:
    iam, arn = request.client("iam"), request.physical_id
    for key, (kind, argument) in _PRINCIPALS.items():
        for principal in request.added(key):
            getattr(iam, f"attach_{kind}_policy")(**{argument: principal}, PolicyArn=arn)
        for principal in request.removed(key):
            getattr(iam, f"detach_{kind}_policy")(**{argument: principal}, PolicyArn=arn)


def _drop_old_versions(iam: Any, arn: str) -> None:
    # IAM keeps at most five versions; the default one cannot be deleted.
    for version in iam.list_policy_versions(PolicyArn=arn)["Versions"]:
        if not version["IsDefaultVersion"]:
            iam.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])


def _delete_managed_policy(request: HandlerRequest) -> None:
    iam, arn = request.client("iam"), request.physical_id
    _attach_principals(request.emptied())
    _drop_old_versions(iam, arn)
    iam.delete_policy(PolicyArn=arn)


# AWS::IAM::InstanceProfile


def _set_roles(request: HandlerRequest) -> None:
    iam, name = request.client("iam"), request.physical_id
    for role in request.removed("Roles"):
        iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role)
    for role in request.added("Roles"):
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)


def _delete_profile(request: HandlerRequest) -> None:
    _set_roles(request.emptied())
    request.client("iam").delete_instance_profile(InstanceProfileName=request.physical_id)


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
        exists=lambda request: all(
            _has_policy(request, kind, principal) for kind, principal in _principals(request)
        ),
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
}
