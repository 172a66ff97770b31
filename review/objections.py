"""Objections to a deploy: data that it would lose, and what CloudFormation would refuse.

Also changes that leave data outside any stack, and valid templates that would fail halfway.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedded_aws import custom_name, references
from review.assembly import Side
from review.changes import Change, Effect
from review.spelling import path_of, short, spell

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
# How long content stays, by name; a bucket's rules are read one by one.
_TIMES = re.compile(r"Retention\w*(Days|Period|Seconds)|(Days|Period)$|WindowInDays")
# Told by rules of their own, here and in security.py.
_TOLD = re.compile(
    "Lifecycle|VersioningConfiguration|PublicAccessBlock|BucketKeyEnabled|EnableKeyRotation"
)
_VERSIONS = "deletes old versions for good"
_ADOPTED_BY = {
    "DatasetBucket": "dataset_bucket=ITS-NAME",
    "RunBucket": "run_bucket=ITS-NAME",
    "DataKey": "kms=ITS-ARN",
}


def find_losses(base: Side, head: Side, changes: Sequence[Change]) -> list[Effect]:
    """List everything that deploying head over base would lose."""
    losses = [loss for change in changes for loss in _losses_of(change)]
    losses += _renamed_stacks(base, head)
    for name, stack in head.stacks.items():
        before = base.stacks.get(name)
        if before is not None and before.is_protected and not stack.is_protected:
            losses.append(
                Effect(
                    kind="loss",
                    stack=name,
                    path="(the stack)",
                    what="termination protection is removed: `cdk destroy` would succeed",
                    instead="keep termination_protection=True",
                )
            )
    return losses


def _renamed_stacks(base: Side, head: Side) -> Iterator[Effect]:
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
                yield Effect(
                    kind="loss",
                    stack=name,
                    path=path_of(logical_id, resource),
                    what=f"{name} is no longer part of the app, and a new stack creates a new, "
                    f"empty {kind}",
                    instead="keep the stack's name, and the prefix that it begins with (prefix=)",
                )


def _losses_of(change: Change) -> Iterator[Effect]:
    kind = STATEFUL.get(change.type)
    if kind is None or change.old is None:
        return
    if change.action in ("removed", "replaced"):
        attribute = "DeletionPolicy" if change.action == "removed" else "UpdateReplacePolicy"
        policy = _policy(change.old, attribute)
        # The stack of a log group that may be deleted says so, but not when.
        accept = "retention" if kind == "log group" and policy == "Delete" else ""
        yield change.effect("loss", *_gone(change, kind, policy), accept)
        return
    for attribute in ("DeletionPolicy", "UpdateReplacePolicy"):
        old, new = _policy(change.old, attribute), _policy(change.new or {}, attribute)
        if _STRENGTH.index(old) < _STRENGTH.index(new):
            yield change.effect(
                "loss",
                f"{attribute} of the {kind} goes from {old} to {new}",
                f"keep {attribute}: {old} (removal_policy)",
            )
    if change.type == "AWS::S3::Bucket":
        yield from _weaker_bucket(change)
    yield from _kept_less(change, kind)


def _kept_less(change: Change, kind: str) -> Iterator[Effect]:
    """Find times that become shorter, and protections of data that are switched off."""
    for path, old, new in change.differences():
        if _TOLD.search(path):
            continue
        before, after = _number(old), _number(new)
        if _TIMES.search(path) and after is not None and (before is None or after < before):
            yield change.effect(
                "loss",
                f"{path} of the {kind} goes from {short(old)} to {new}: its content is deleted for "
                "good that much sooner",
                f"keep {path}",
                "retention",
            )
        elif (_is_on(old) and not _is_on(new)) or (path == "Enabled" and new is False):
            yield change.effect(
                "loss", f"{path} of the {kind} goes from {short(old)} to {short(new)}", "keep it on"
            )


def _number(value: object) -> float | None:
    return float(value) if re.fullmatch(r"[\d.]+", str(value)) else None  # type: ignore[arg-type]


def _is_on(value: object) -> bool:
    return str(value).lower() in ("true", "enabled")


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


def _weaker_bucket(change: Change) -> Iterator[Effect]:
    status = "VersioningConfiguration"
    old, new = (
        (each.get(status) or {}).get("Status")
        for each in (change.old_properties, change.new_properties)
    )
    if old == "Enabled" != new:
        yield change.effect(
            "loss",
            "versioning is suspended: an overwritten or deleted object is gone at once",
            "keep versioned=True",
        )
    before = dict(_ends(change.old_properties))
    for (what, scope), days in _ends(change.new_properties):
        was = before.get((what, scope))
        if was is None or days < was:
            longer = f" after {days:g} days, no longer {was:g}" if was else f" after {days:g} days"
            yield change.effect(
                "loss",
                f"a lifecycle rule {what} under {scope or 'every key'}{longer}",
                "remove the rule: checkpoints and datasets do not become useless with age",
                "retention" if what == _VERSIONS else "",
            )


def _ends(bucket: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield what the bucket's lifecycle ends, under which keys, and after how many days."""
    for rule in (bucket.get("LifecycleConfiguration") or {}).get("Rules") or []:
        if rule.get("Status") != "Enabled":
            continue
        filters = [rule[each] for each in ("Prefix", "TagFilters", "Filter") if rule.get(each)]
        scope = spell(filters) if filters else ""
        if "ExpirationInDays" in rule or "ExpirationDate" in rule:
            yield ("deletes current objects", scope), float(rule.get("ExpirationInDays", 0))
        old = rule.get("NoncurrentVersionExpiration") or {}
        days = old.get("NoncurrentDays", rule.get("NoncurrentVersionExpirationInDays"))
        if days is not None:
            yield (_VERSIONS, scope), float(days)
        moves = [*(rule.get("Transitions") or []), rule.get("Transition") or {}]
        for each in moves:
            if (to := each.get("StorageClass")) in ("GLACIER", "DEEP_ARCHIVE"):
                what = f"moves current objects to {to}, where nothing can read them,"
                yield (what, scope), float(each.get("TransitionInDays", 0))


def _policy(resource: Mapping[str, Any], attribute: str) -> str:
    policy = str(resource.get(attribute, "Delete"))
    return policy if policy in _STRENGTH else "Delete"


def find_refusals(base: Side, head: Side, changes: Sequence[Change]) -> list[Effect]:
    """List everything that would make deploying head over base fail."""
    return [
        *(refusal for change in changes for refusal in _refusals_of(change)),
        *_names_taken(changes),
        *_exports_in_use(base, head, changes),
    ]


def _refusals_of(change: Change) -> Iterator[Effect]:
    if change.action != "replaced" or change.old is None:
        return
    if change.old["Type"] != change.type:
        yield change.effect(
            "refused",
            what=f"a resource cannot become another type ({change.old['Type']} → {change.type})",
            instead="use another id",
        )
    name = custom_name(change.type, change.new_properties)
    if name and name == custom_name(change.type, change.old_properties):
        yield change.effect(
            "refused",
            what=f"it is replaced, and the template names it {name}: the new one is created before "
            "the old one is deleted, and the name is taken",
            instead="change the name as well",
        )


def _names_taken(changes: Sequence[Change]) -> Iterator[Effect]:
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
            yield change.effect(
                "refused",
                what=f"the name {name} still belongs to {old.path} when it is created",
                instead="keep the logical id, or change the name",
            )


def _exports_in_use(base: Side, head: Side, changes: Sequence[Change]) -> Iterator[Effect]:
    """Find exports that a deployed stack imports: they cannot be removed or changed."""
    imported = {
        name: user for user, stack in base.stacks.items() for name in imports_of(stack.template)
    }
    replaced = {(each.stack, each.logical_id) for each in changes if each.action == "replaced"}
    for stack_name, stack in head.stacks.items():
        before = base.stacks.get(stack_name)
        exports = exports_of(stack.template)
        for name in exports_of(before.template) if before else ():
            if name not in imported:
                continue
            user = imported[name]
            if name not in exports:
                yield Effect(
                    kind="refused",
                    stack=stack_name,
                    path=name,
                    what=f"the export is removed while {user} imports it",
                    instead=f"keep it with export_value until {user} is deployed without it",
                )
            elif any((stack_name, each) in replaced for each, _ in references(exports[name])):
                yield Effect(
                    kind="refused",
                    stack=stack_name,
                    path=name,
                    what=f"the export's value changes while {user} imports it",
                    instead="create a new resource under another id and move to it in two deploys",
                )


def exports_of(template: Any) -> dict[str, Any]:
    """Return the values that a template exports, by name."""
    outputs = (template.get("Outputs") or {}).values()
    return {spell(each["Export"]["Name"]): each["Value"] for each in outputs if "Export" in each}


def imports_of(node: Any) -> Iterator[str]:
    """Yield the names that a part of a template imports."""
    if isinstance(node, list):
        for item in node:
            yield from imports_of(item)
    elif isinstance(node, dict):
        if "Fn::ImportValue" in node:
            yield spell(node["Fn::ImportValue"])
        for item in node.values():
            yield from imports_of(item)
