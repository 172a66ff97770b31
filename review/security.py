"""Changes to who may do what: statements, network rules, encryption, metadata access.

Policy documents are compared as sets of permissions, with run ids and code hashes neutralized.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from embedded_aws import references
from review.assembly import GUARD, Side
from review.changes import Change, Effect
from review.run_effects import read_run_env
from review.spelling import as_list, leaves, short, spell

# The property with the policy document, by resource type; of all others it is PolicyDocument.
DOCUMENTS = {
    "AWS::IAM::Role": "AssumeRolePolicyDocument",
    "AWS::KMS::Key": "KeyPolicy",
    "AWS::Logs::LogGroup": "ResourcePolicyDocument",
    "AWS::SecretsManager::ResourcePolicy": "ResourcePolicy",
}
# Lists in which each item grants access.
_GRANTS = {
    "AWS::IAM::Role": ("ManagedPolicyArns",),
    "AWS::IAM::User": ("ManagedPolicyArns", "Groups"),
    "AWS::IAM::Group": ("ManagedPolicyArns",),
    "AWS::EC2::SecurityGroup": ("SecurityGroupIngress", "SecurityGroupEgress"),
}
# Resources that only grant access.
_GRANTING = (
    "AWS::EC2::SecurityGroupIngress",
    "AWS::EC2::SecurityGroupEgress",
    "AWS::Lambda::Permission",
    "AWS::Lambda::Url",
    "AWS::IAM::AccessKey",
    "AWS::IAM::UserToGroupAddition",
)
# No template shows what these allow.
_UNSHOWN = ("ManagedPolicyArns", "Groups", "AccessKey", "UserToGroupAddition")
# Protective properties, by type; any part of a path matches.
_PROTECTIONS = {
    "AWS::S3::Bucket": (
        "BucketEncryption",
        "PublicAccessBlockConfiguration",
        "OwnershipControls",
        "AccessControl",
        "LoggingConfiguration",
    ),
    "AWS::EC2::LaunchTemplate": (
        "MetadataOptions",
        "Encrypted",
        "KmsKeyId",
        "KeyName",
        "SecurityGroupIds",
        "IamInstanceProfile",
        "AssociatePublicIpAddress",
    ),
    "AWS::EC2::Subnet": ("MapPublicIpOnLaunch",),
    "AWS::SNS::Topic": ("KmsMasterKeyId",),
    "AWS::SNS::Subscription": ("Endpoint", "Protocol"),
    "AWS::Logs::LogGroup": ("KmsKeyId",),
    "AWS::KMS::Key": ("EnableKeyRotation",),
    "AWS::EC2::FlowLog": ("TrafficType",),
    **dict.fromkeys(("AWS::IAM::Role", "AWS::IAM::User"), ("PermissionsBoundary",)),
}
Known = set[tuple[str, bool]]  # actions, and whether on any resource
_ENCRYPTION = re.compile(r"Encrypt|Kms\w*Key|KMS\w*Key")
# What actions with these names destroy, or let somebody do who could not.
_GRAVE = (
    *("Delete", "Terminate", "Remove", "Purge", "Deregister", "Disable", "ScheduleKeyDeletion"),
    *("PassRole", "AssumeRole", "Attach", "CreateAccessKey", "CreateGrant", "CreateRole"),
    *("CreatePolicyVersion", "UpdateAssumeRolePolicy", "UpdateFunctionCode", "SendCommand"),
    *("PutRolePolicy", "PutUserPolicy", "PutGroupPolicy", "PutBucketPolicy", "PutKeyPolicy"),
    *("PutLifecycleConfiguration", "PutBucketVersioning", "PutRetentionPolicy", "BypassGovernance"),
)
_ANYTHING = re.compile(r"all but |\*$|arn:[^:]*:[^:]*:[^:]*:[^:]*:\*")
# Resources whose removal or addition matters by itself.
_PROTECTING = ("AWS::EC2::FlowLog", "AWS::S3::BucketPolicy", "AWS::SNS::TopicPolicy")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Permission:
    """One action on one resource for one principal, in readable form."""

    effect: str
    principal: str
    condition: str
    resource: str
    action: str


def permissions(document: Any) -> set[Permission]:
    """Split a document, or its JSON text, into single permissions."""
    if isinstance(document, str):
        document = json.loads(document)
    if not isinstance(document, Mapping):
        return set()
    if "Statement" not in document:
        # A document built with an intrinsic function counts as one permission.
        return {Permission(effect="Allow", principal="", condition="", resource="",
                           action=spell(document))}  # fmt: skip
    return {
        each for statement in as_list(document["Statement"]) for each in _permissions_of(statement)
    }


def _permissions_of(statement: Mapping[str, Any]) -> Iterator[Permission]:
    principals = list(_principals(statement))
    actions = _either(statement, "Action", "NotAction", "all but ")
    resources = _either(statement, "Resource", "NotResource", "all but ")
    condition = spell(statement["Condition"]) if statement.get("Condition") else ""
    for principal, action, resource in product(principals, actions, resources):
        yield Permission(
            effect=str(statement.get("Effect", "Allow")),
            principal=principal,
            condition=condition,
            resource=resource,
            action=action,
        )


def _principals(statement: Mapping[str, Any]) -> Iterator[str]:
    for key, negation in (("Principal", ""), ("NotPrincipal", "all but ")):
        given = statement.get(key)
        if isinstance(given, Mapping) and not any(name.startswith("Fn::") for name in given):
            for kind, names in given.items():
                yield from (f"{negation}{kind} {spell(name)}" for name in as_list(names))
        elif given is not None:
            yield f"{negation}{spell(given)}"
    if "Principal" not in statement and "NotPrincipal" not in statement:
        yield ""


def _either(statement: Mapping[str, Any], name: str, inverse: str, negation: str) -> list[str]:
    if name in statement:
        return [spell(each) for each in as_list(statement[name])]
    # The meaning of NotAction depends on all its items together.
    return [negation + spell(as_list(statement[inverse]))] if inverse in statement else [""]


def sentences(found: Iterable[Permission]) -> list[str]:
    """Describe permissions in a few sentences, merging those that differ in one respect."""
    actions: dict[tuple[str, str, str, str], list[str]] = {}
    for each in sorted(found):
        key = (each.effect, each.principal, each.condition, each.resource)
        actions.setdefault(key, []).append(each.action)
    resources: dict[tuple[str, str, str, str], list[str]] = {}
    for (effect, principal, condition, resource), listed in actions.items():
        together = (effect, principal, condition, ", ".join(listed))
        resources.setdefault(together, []).append(resource)
    return [
        " ".join(
            part
            for part in (
                effect,
                principal and f"to {principal}",
                action,
                f"on {', '.join(listed)}" if any(listed) else "",
                condition and f"if {condition}",
            )
            if part
        )
        for (effect, principal, condition, action), listed in resources.items()
    ]


def find_security_changes(base: Side, head: Side, changes: Sequence[Change]) -> list[Effect]:
    """List the changes of permissions and protections, widening ones first."""
    found = []
    for change in changes:
        is_new = change.stack not in base.stacks
        # A new stack may do what others do; one that is not deployed takes nothing from what is.
        known = {
            (it.action, it.resource == "*")
            for each in base.stacks.values()
            for resource in (each.resources.values() if is_new else ())
            for it in _granted(resource)
        }
        rows = _of(change, _holder(change, head), known)
        found += [replace(it, accept="") if is_new and base.is_deployed else it for it in rows]
    order = {"widens": 0, "changes": 1, "narrows": 2}
    return sorted(found, key=lambda item: (order[item.action], item.stack, item.path))


def _holder(change: Change, head: Side) -> str:
    """Return who must agree if a change takes permissions away: the Guard's or the alarms'."""
    stack, old = head.stacks[change.stack], change.old_properties
    named = [old.get(key) for key in ("Roles", "FunctionName", "Topics")]
    holders = {change.logical_id, *(name for name, _ in references(named))} & stack.resources.keys()
    guards = {name: each["Properties"] for name, each in stack.resources.items()
              if (each.get("Properties") or {}).get("Handler") == GUARD}  # fmt: skip
    roles = {name for each in guards.values() for name, _ in references(each.get("Role"))}
    if change.old is None or not holders:
        return ""
    if holders & (roles | guards.keys()):
        return "guard"
    return "alarms" if change.type == "AWS::SNS::TopicPolicy" else ""


def without_names(base: Side, head: Side, changes: Sequence[Change]) -> list[Change]:
    """Return the changes with neutral names, which match a run's resources to the last run's."""
    runs = {}
    for name in {each.stack for each in changes}:
        both = [each.stacks[name] for each in (base, head) if name in each.stacks]
        ids = [read_run_env(each).get("RUN_ID", "") for each in both]
        # If the run id stays the same, it is not neutralized.
        runs[name] = ids if all(ids) and len({*ids}) == 2 else ["", ""]
    return list(_renamed(changes, runs))


def _renamed(changes: Sequence[Change], runs: Mapping[str, list[str]]) -> Iterator[Change]:
    def place(change: Change) -> tuple[str, str, str]:
        run_id = runs[change.stack][change.action == "added"]
        return change.stack, change.type, _neutral(change.path, run_id)

    gone = {place(each): each for each in changes if each.action == "removed"}
    added = [each for each in changes if each.action == "added"]
    pairs = {id(each): gone.pop(place(each)) for each in added if place(each) in gone}
    new_ids = [(pairs[id(each)].logical_id, each.logical_id) for each in added if id(each) in pairs]
    for each in changes:
        if any(each is old for old in pairs.values()):
            continue
        before = pairs.get(id(each), each)
        old_id, new_id = runs[each.stack]
        yield replace(
            each,
            action=each.action if before is each else "changed",
            old=before.old and json.loads(_neutral(json.dumps(before.old), old_id, new_ids)),
            new=each.new and json.loads(_neutral(json.dumps(each.new), new_id)),
        )


def _neutral(text: str, run_id: str, new_ids: Iterable[tuple[str, str]] = ()) -> str:
    """Return text without hashes of code, without the run's id, and with new logical ids."""
    text = re.sub(r"\b[0-9a-f]{64}\b", "CODE", text)
    if run_id:
        text = re.sub(rf"(?<![\w-]){re.escape(run_id)}(?![\w-])", "RUN_ID", text)
    for old, new in new_ids:
        text = text.replace(f'"{old}"', f'"{new}"')
    return text


def _of(change: Change, holder: str, known: Known) -> Iterator[Effect]:
    # What a stack keeps when it goes stays in force.
    policy = (change.old or {}).get("DeletionPolicy", "")
    if change.action == "removed" and policy.startswith("Retain"):
        return
    both = change.old_properties, change.new_properties
    old, new = (_granted(each) for each in (change.old, change.new))
    yield from _permission_changes(change, old, new, holder, known)
    for name in _GRANTS.get(change.type, ()):
        had, has = (each.get(name) or [] for each in both)
        yield from _grant_changes(change, name, had, has, holder)
    if change.type in _GRANTING:
        had, has = ([each] if each else [] for each in both)
        yield from _grant_changes(change, change.type.rpartition("::")[2], had, has, holder)
    if change.action not in ("added", "removed"):
        for path, before, after in change.differences():
            if not _device_goes(path, change) and any(
                name in path.split(".") for name in _PROTECTIONS.get(change.type, ())
            ):
                what = f"{path}: {short(before)} → {short(after)}"
                is_plain = bool(_ENCRYPTION.search(path)) and not after
                accept = "encryption" * is_plain or "permissions" * path.endswith("Boundary")
                accept *= bool(before)
                yield _row(change, "widens" if accept else "changes", what, accept)
    if change.type in _PROTECTING and change.action in ("added", "removed"):
        name = change.type.rpartition("::")[2]
        action = "narrows" if change.action == "added" else "widens"
        yield _row(change, action, f"the {name} is {change.action}")


def _device_goes(path: str, change: Change) -> bool:
    """Whether a property is gone because its volume is gone."""
    device = re.match(r"LaunchTemplateData\.BlockDeviceMappings\.\d+\.", path)
    return device is not None and not any(
        name.startswith(device[0]) for name, _ in leaves(change.new_properties)
    )


def _permission_changes(
    change: Change, old: set[Permission], new: set[Permission], holder: str, known: Known
) -> Iterator[Effect]:
    left = {replace(each, resource="", condition="") for each in new if each.effect == "Allow"}
    for sign, found in (("−", old - new), ("+", new - old)):
        words: dict[tuple[bool, str], list[Permission]] = {}
        for each in found:
            # Removing a denial widens access, like adding a permission.
            is_wider, accept = (sign == "+") != (each.effect == "Deny"), ""
            if is_wider and (each.action, each.resource == "*") not in known:
                # The first policy of a new key or log group is its own.
                is_own = change.old is None and change.type in (
                    "AWS::KMS::Key",
                    "AWS::Logs::LogGroup",
                )
                accept = "permissions" * (_is_grave(each) and not is_own)
            elif not is_wider and replace(each, resource="", condition="") not in left:
                accept = holder
            words.setdefault((is_wider, accept), []).append(each)
        for (is_wider, accept), listed in words.items():
            for sentence in sentences(listed):
                yield _row(
                    change, "widens" if is_wider else "narrows", f"{sign} {sentence}", accept
                )


def _granted(resource: Mapping[str, Any] | None) -> set[Permission]:
    """Return what a resource's documents say."""
    properties = (resource or {}).get("Properties") or {}
    name = DOCUMENTS.get(str((resource or {}).get("Type")), "PolicyDocument")
    inline = [each.get("PolicyDocument") for each in as_list(properties.get("Policies"))]
    return {it for document in [properties.get(name), *inline] for it in permissions(document)}


def _is_grave(permission: Permission) -> bool:
    """Whether a permission, or a denial that goes, destroys, empowers or names anything."""
    head, star, _ = permission.action.rpartition(":")[2].partition("*")
    is_named = any(head.startswith(verb) or (star and verb.startswith(head)) for verb in _GRAVE)
    resource = re.sub(r"\$\{[^}]*\}", "", permission.resource)
    # In the policy of a resource, a star is the resource itself; lists take no resource.
    is_any = not permission.principal and not head.startswith(("Describe", "List"))
    return (
        permission.effect == "Deny"
        or permission.action.startswith("all but ")
        or (is_named and not permission.principal.startswith("Service "))
        or (is_any and bool(_ANYTHING.match(resource)))
    )


def _grant_changes(
    change: Change, name: str, before: Sequence[Any], after: Sequence[Any], holder: str
) -> Iterator[Effect]:
    old, new = ({spell(item) for item in items} for items in (before, after))
    for item in sorted(old - new):
        yield _row(change, "narrows", f"− {name}: {item}", holder)
    for item in sorted(new - old):
        yield _row(change, "widens", f"+ {name}: {item}", "permissions" * (name in _UNSHOWN))


def _row(change: Change, action: str, what: str, accept: str = "") -> Effect:
    return replace(change.effect("security", what, accept=accept), action=action)
