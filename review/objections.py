"""Objections to a deploy: data that it would lose, and what CloudFormation would refuse.

Also changes that leave data outside any stack, and valid templates that would fail halfway.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedded_aws import custom_name, references
from review.assembly import Side
from review.changes import Change, Effect, exports_of, imports_of
from review.spelling import as_list, number, path_of, short, spell

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
_STRENGTH = ("Retain", "Snapshot", "Delete")
# How long content stays; a bucket's rules are read one by one.
_TIMES = re.compile(r"^(?!Lifecycle).*(Days|Period|Seconds)$")
# Told by rules of their own, here and in security.py.
_TOLD = re.compile("Lifecycle|PublicAccessBlock|BucketKeyEnabled|EnableKeyRotation")
_GUARDED = "TerminationProtection"
_VERSIONS = "deletes old versions for good"
_ADOPTED_BY = {
    "DatasetBucket": "dataset_bucket=ITS-NAME",
    "RunBucket": "run_bucket=ITS-NAME",
    "DataKey": "kms=ITS-ARN",
}


def find_losses(base: Side, head: Side, changes: Sequence[Change]) -> list[Effect]:
    """List everything that deploying head over base would lose."""
    return [
        *(loss for change in changes for loss in _losses_of(change)),
        *_renamed_stacks(base, head),
    ]


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
                what = f"{name} is no longer part of the app, and a new stack creates a new, empty"
                instead = "keep the stack's name, and the prefix that it begins with (prefix=)"
                place = path_of(logical_id, resource)
                yield Effect("loss", f"{what} {kind}", instead, stack=name, path=place)


def _losses_of(change: Change) -> Iterator[Effect]:
    kind = STATEFUL.get(change.type)
    if change.old_properties.get(_GUARDED) and not change.new_properties[_GUARDED]:
        what = "termination protection is removed: `cdk destroy` would succeed"
        yield change.effect("loss", what, "keep termination_protection=True")
    if kind is None or change.old is None:
        return
    if change.action in ("removed", "replaced"):
        attribute = "DeletionPolicy" if change.action == "removed" else "UpdateReplacePolicy"
        policy = _policy(change.old, attribute)
        # The stack of such a log group says that it may be deleted, but not when.
        accept = "retention" if kind == "log group" and policy == "Delete" else ""
        yield change.effect("loss", *_gone(change, kind, policy), accept)
        return
    for attribute in ("DeletionPolicy", "UpdateReplacePolicy"):
        was, now = _policy(change.old, attribute), _policy(change.new or {}, attribute)
        if _STRENGTH.index(was) < _STRENGTH.index(now):
            what = f"{attribute} of the {kind} goes from {was} to {now}"
            yield change.effect("loss", what, f"keep {attribute}: {was} (removal_policy)")
    yield from _kept_less(change, kind)


def _kept_less(change: Change, kind: str) -> Iterator[Effect]:
    """Find what ends sooner than before, and what is switched off."""
    before = dict(_ends(change.old_properties))
    for (what, scope), days in _ends(change.new_properties):
        was_days = before.get((what, scope), math.inf)
        if days < was_days:
            longer = f", no longer {was_days:g}" if was_days < math.inf else ""
            yield change.effect(
                "loss",
                f"a lifecycle rule {what} under {scope or 'every key'} after {days:g} days{longer}",
                "remove the rule: checkpoints and datasets do not become useless with age",
                "retention" if what == _VERSIONS else "",
            )
    for path, old, new in change.differences():
        what = f"{path} of the {kind} goes from {short(old)} to {short(new)}"
        if _TIMES.search(path) and number(new, math.inf) < number(old, math.inf):
            what += ": its content is deleted for good that much sooner"
            yield change.effect("loss", what, f"keep {short(old)}", "retention")
        elif _is_on(old, path) and not _is_on(new, path) and not _TOLD.search(path):
            if path.startswith("Versioning"):
                what = "versioning is suspended: an overwritten or deleted object is gone at once"
            yield change.effect("loss", what, f"keep {path}")


def _is_on(value: object, path: str) -> bool:
    return str(value).lower() in ("true", "enabled") or (value is None and path == "Enabled")


def _ends(bucket: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield what the bucket's lifecycle ends, under which keys, and after how many days."""
    for rule in as_list((bucket.get("LifecycleConfiguration") or {}).get("Rules")):
        if rule.get("Status") != "Enabled":
            continue
        scope = spell([rule[each] for each in ("Prefix", "TagFilters", "Filter") if rule.get(each)])
        if "ExpirationInDays" in rule or "ExpirationDate" in rule:
            yield ("deletes current objects", scope), number(rule.get("ExpirationInDays"))
        if days := (rule.get("NoncurrentVersionExpiration") or {}).get("NoncurrentDays"):
            yield (_VERSIONS, scope), number(days)
        for each in as_list(rule.get("Transitions")):
            if (to := each.get("StorageClass")) in ("GLACIER", "DEEP_ARCHIVE"):
                what = f"moves current objects to {to}, where nothing can read them,"
                yield (what, scope), number(each.get("TransitionInDays"))


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


def _policy(resource: Mapping[str, Any], attribute: str) -> str:
    # RetainExceptOnCreate differs only in the deploy that creates the resource, if that fails.
    policy = str(resource.get(attribute, "Delete")).removesuffix("ExceptOnCreate")
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
        exports = exports_of(stack)
        for name in exports_of(before) if before else ():
            if name not in imported:
                continue
            user = imported[name]
            if name not in exports:
                what = f"the export is removed while {user} imports it"
                instead = f"keep it with export_value until {user} is deployed without it"
                yield Effect("refused", what, instead, stack=stack_name, path=name)
            elif any((stack_name, each) in replaced for each, _ in references(exports[name])):
                what = f"the export's value changes while {user} imports it"
                instead = "create a new resource under another id and move to it in two deploys"
                yield Effect("refused", what, instead, stack=stack_name, path=name)
