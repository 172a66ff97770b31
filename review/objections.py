"""Objections to a deploy: data that it would lose, and what CloudFormation would refuse.

Also changes that leave data outside any stack, and valid templates that would fail halfway.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedded_aws import custom_name, references
from review.assembly import Side
from review.changes import Change, Objection
from review.spelling import path_of, spell

# Resources whose content cannot be recreated.
STATEFUL = {
    "AWS::S3::Bucket": "bucket",
    "AWS::KMS::Key": "key",
    "AWS::Logs::LogGroup": "log group",
    "AWS::EC2::Volume": "volume",
    "AWS::EFS::FileSystem": "file system",
    "AWS::FSx::FileSystem": "file system",
    "AWS::DynamoDB::Table": "table",
    "AWS::SecretsManager::Secret": "secret",
}
# Strongest first; the last is CloudFormation's default.
_STRENGTH = ("Retain", "RetainExceptOnCreate", "Snapshot", "Delete")
_ADOPTED_BY = {
    "DatasetBucket": "dataset_bucket=ITS-NAME",
    "RunBucket": "run_bucket=ITS-NAME",
    "DataKey": "kms=ITS-ARN",
}


def find_losses(base: Side, head: Side, changes: Sequence[Change]) -> list[Objection]:
    """List everything that deploying head over base would lose."""
    losses = [loss for change in changes for loss in _losses_of(change)]
    losses += _renamed_stacks(base, head)
    for name, stack in head.stacks.items():
        before = base.stacks.get(name)
        if before is not None and before.is_protected and not stack.is_protected:
            losses.append(
                Objection(
                    stack=name,
                    path="(the stack)",
                    what="termination protection is removed: `cdk destroy` would succeed",
                    instead="keep termination_protection=True",
                )
            )
    return losses


def _renamed_stacks(base: Side, head: Side) -> Iterator[Objection]:
    """Find stacks replaced by a new one with the same kinds of storage, which start empty."""
    new = {
        each["Type"]
        for name in head.stacks.keys() - base.stacks.keys()
        for each in head.stacks[name].resources.values()
    }
    for name in sorted(base.stacks.keys() - head.stacks.keys()):
        for logical_id, resource in base.stacks[name].resources.items():
            kind = STATEFUL.get(resource["Type"])
            if kind and kind != "log group" and resource["Type"] in new:
                yield Objection(
                    stack=name,
                    path=path_of(logical_id, resource),
                    what=f"{name} is no longer part of the app, and a new stack creates a new, "
                    f"empty {kind}",
                    instead="keep the stack's name, and the prefix that it begins with (prefix=)",
                )


def _losses_of(change: Change) -> Iterator[Objection]:
    kind = STATEFUL.get(change.type)
    if kind is None or change.old is None:
        return
    if change.action in ("removed", "replaced"):
        attribute = "DeletionPolicy" if change.action == "removed" else "UpdateReplacePolicy"
        policy = _policy(change.old, attribute)
        if kind == "log group" and policy == "Delete":
            return  # Its stack declares that it may be deleted.
        yield change.objection(*_gone(change, kind, policy))
        return
    for attribute in ("DeletionPolicy", "UpdateReplacePolicy"):
        old, new = _policy(change.old, attribute), _policy(change.new or {}, attribute)
        if _STRENGTH.index(old) < _STRENGTH.index(new):
            yield change.objection(
                f"{attribute} of the {kind} goes from {old} to {new}",
                f"keep {attribute}: {old} (removal_policy)",
            )
    if change.type == "AWS::S3::Bucket":
        yield from _weaker_bucket(change)
    if change.type == "AWS::KMS::Key" and change.new_properties.get("Enabled") is False:
        yield change.objection(
            "the key is disabled: what it encrypts cannot be read", "keep it enabled"
        )


def _gone(change: Change, kind: str, policy: str) -> tuple[str, str]:
    verb = {"removed": "is removed", "replaced": f"is replaced ({change.why})"}[change.action]
    option = next((name for part, name in _ADOPTED_BY.items() if part in change.path), None)
    if policy == "Delete":
        return (
            f"the {kind} {verb} and deleted along with its content",
            "keep its id and its properties, or set removal_policy=RETAIN in an earlier deploy",
        )
    new = ", and a new, empty one takes its place" if change.action == "replaced" else ""
    adopt = f"; to continue with the old one: -c {option}" if option else ""
    return (
        f"the {kind} {verb}: it stays in the account ({policy}), but in no stack{new}",
        f"keep its id and its properties{adopt}",
    )


def _weaker_bucket(change: Change) -> Iterator[Objection]:
    old, new = change.old_properties, change.new_properties
    status = "VersioningConfiguration"
    if (old.get(status) or {}).get("Status") == "Enabled" and (new.get(status) or {}).get(
        "Status"
    ) != "Enabled":
        yield change.objection(
            "versioning is suspended: an overwritten or deleted object is gone at once",
            "keep versioned=True",
        )
    known = [_without_id(rule) for rule in _rules(old)]
    for rule in _rules(new):
        if _without_id(rule) not in known and _expires_current(rule):
            prefix = rule.get("Prefix") or "every key"
            yield change.objection(
                f"a lifecycle rule deletes current objects under {prefix}",
                "remove the rule: checkpoints and datasets do not become useless with age",
            )


def _rules(properties: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return (properties.get("LifecycleConfiguration") or {}).get("Rules") or []


def _without_id(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key != "Id"}


def _expires_current(rule: Mapping[str, Any]) -> bool:
    names = ("ExpirationInDays", "ExpirationDate")
    return rule.get("Status") == "Enabled" and any(name in rule for name in names)


def _policy(resource: Mapping[str, Any], attribute: str) -> str:
    policy = str(resource.get(attribute, "Delete"))
    return policy if policy in _STRENGTH else "Delete"


def find_refusals(base: Side, head: Side, changes: Sequence[Change]) -> list[Objection]:
    """List everything that would make deploying head over base fail."""
    return [
        *(refusal for change in changes for refusal in _refusals_of(change)),
        *_names_taken(changes),
        *_exports_in_use(base, head, changes),
    ]


def _refusals_of(change: Change) -> Iterator[Objection]:
    if change.action != "replaced" or change.old is None:
        return
    if change.old["Type"] != change.type:
        yield change.objection(
            what=f"a resource cannot become another type ({change.old['Type']} → {change.type})",
            instead="use another id",
        )
    name = custom_name(change.type, change.new_properties)
    if name and name == custom_name(change.type, change.old_properties):
        yield change.objection(
            what=f"it is replaced, and the template names it {name}: the new one is created before "
            "the old one is deleted, and the name is taken",
            instead="change the name as well",
        )


def _names_taken(changes: Sequence[Change]) -> Iterator[Objection]:
    """Find names that move to another logical id: both resources would exist at once."""
    had = {
        (change.type, name): change
        for change in changes
        if change.action == "removed" and (name := custom_name(change.type, change.old_properties))
    }
    for change in changes:
        name = custom_name(change.type, change.new_properties)
        if change.action == "added" and name and (change.type, name) in had:
            old = had[change.type, name]
            yield change.objection(
                what=f"the name {name} still belongs to {old.path} when it is created",
                instead="keep the logical id, or change the name",
            )


def _exports_in_use(base: Side, head: Side, changes: Sequence[Change]) -> Iterator[Objection]:
    """Find exports that a deployed stack imports: they cannot be removed or changed."""
    imported = {
        name: user for user, stack in base.stacks.items() for name in _imports(stack.template)
    }
    replaced = {(each.stack, each.logical_id) for each in changes if each.action == "replaced"}
    for stack_name, stack in head.stacks.items():
        before = base.stacks.get(stack_name)
        exports = _exports(stack.template)
        for name in _exports(before.template) if before else ():
            if name not in imported:
                continue
            user = imported[name]
            if name not in exports:
                yield Objection(
                    stack=stack_name,
                    path=name,
                    what=f"the export is removed while {user} imports it",
                    instead=f"keep it with export_value until {user} is deployed without it",
                )
            elif any((stack_name, each) in replaced for each, _ in references(exports[name])):
                yield Objection(
                    stack=stack_name,
                    path=name,
                    what=f"the export's value changes while {user} imports it",
                    instead="create a new resource under another id and move to it in two deploys",
                )


def _exports(template: Any) -> dict[str, Any]:
    outputs = (template.get("Outputs") or {}).values()
    return {spell(each["Export"]["Name"]): each["Value"] for each in outputs if "Export" in each}


def _imports(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _imports(item)
    elif isinstance(node, dict):
        if "Fn::ImportValue" in node:
            yield spell(node["Fn::ImportValue"])
        for item in node.values():
            yield from _imports(item)
