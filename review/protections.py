"""The protections a deploy would remove: alarms, the Guard and what calls it, IMDSv2, closed doors.

Each has a name; one that is not accepted by name (--accept NAME) makes the review fail.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedded_aws import references
from review.assembly import GUARD, Side
from review.changes import Change, Effect
from review.run_effects import has_deadline
from review.security import DOCUMENTS, permissions, sentences
from review.spelling import as_list, number, short, spell

PROTECTIONS = (
    *("alarms", "guard", "imdsv1", "public", "permissions", "encryption", "retention", "boot"),
)
# The name for --accept, the wording, and the property without which it does nothing; by type, of
# functions by their Handler: others than the Guard may go.
_WATCHERS = {
    "AWS::CloudWatch::Alarm": ("alarms", "the alarm", "AlarmActions"),
    GUARD: ("guard", "the function that stops a run", "Code"),
}
# What a rule calls or fills, by its target.
_RULES = {
    GUARD: ("guard", "calls the Guard"),
    "AWS::SNS::Topic": ("alarms", "sends mail"),
    "AWS::Logs::LogGroup": ("retention", "keeps the record"),
}
_MINUTES = {"minute": 1.0, "hour": 60.0, "day": 1440.0}
# S3 does not call a statement public if it fixes the value of one of these: docs.aws.amazon.com/
# AmazonS3/latest/userguide/access-control-block-public-access.html, "The meaning of public".
_NARROWING = re.compile(
    "kms:CallerAccount|aws:(PrincipalOrgID|PrincipalOrgPaths|PrincipalArn|PrincipalAccount|"
    "SourceIp|SourceArn|SourceVpce?|SourceOwner|SourceAccount|userid)|s3:DataAccessPoint(Arn|Account)",
    re.IGNORECASE,
)
# What lets anyone in without a policy document.
_DOORS = re.compile(r"^(AuthType NONE|Principal \*)$|(^|\.)(CidrIp 0\.0\.0\.0|CidrIpv6 ::)/0$")
_Weakened = Iterator[tuple[str, str, str]]  # what, what to do instead, the name that accepts it
_BLOCKS = "PublicAccessBlockConfiguration"


def find_weakened(base: Side, head: Side, changes: Sequence[Change]) -> list[Effect]:
    """List the protections that a deploy takes away, each with the name that accepts it."""
    return [
        change.effect("weakened", what, instead, accept)
        for change in changes
        for what, instead, accept in (
            *_idle(change, changes, base),
            *_deaf(change, base, head),
            *_unheard(change, head),
            *_open(change, head),
        )
    ]


def _kind(properties: Mapping[str, Any], type_name: str) -> str:
    return GUARD if properties.get("Handler") == GUARD else type_name


def _watcher(change: Change, base: Side) -> tuple[str, str, str]:
    if change.type != "AWS::Events::Rule":
        return _WATCHERS.get(_kind(change.old_properties, change.type), ("", "", ""))
    text, resources = json.dumps(change.old_properties), base.stacks[change.stack].resources
    named = [name for name, _ in references(change.old_properties.get("Targets"))]
    # A log group is a target by its name.
    targets = filter(None, map(resources.get, named))
    types = {_kind(each.get("Properties") or {}, each["Type"]) for each in targets}
    types |= {"AWS::Logs::LogGroup"} if ":log-group:" in text else set()
    accept, does = next((_RULES[each] for each in sorted(types) if each in _RULES), ("", ""))
    what = "the clock" if "ScheduleExpression" in change.old_properties else "the rule"
    return accept, f"{what} that {does}", "Targets"


def _idle(change: Change, changes: Sequence[Change], base: Side) -> _Weakened:
    """Find alarms, rules and functions that no longer do anything, or are cut off."""
    name, what, acts = _watcher(change, base) if change.old else ("", "", "")
    old, new = change.old_properties, change.new_properties
    if not (name and _works(acts, old)):
        return
    how = f"has no {acts}" if new and not new.get(acts) else "is disabled" if new else "is removed"
    # The same handler, or the same properties, may do the job under another logical id.
    same = ["Handler"] if "Handler" in old else [key for key in old if "Description" not in key]
    if _works(acts, new):
        for key in ("Timeout", "MemorySize") if "Handler" in old else ():
            if (after := number(new.get(key))) < (before := number(old.get(key))):
                how = f"gets a {key} of {after:g}, no longer {before:g}: a call may be cut off"
                yield f"{what} {how}", f"keep {before:g}", name
        if old.get("TreatMissingData") == "breaching" != new.get("TreatMissingData"):
            yield f"{what} no longer fires where nothing reports", "keep it breaching", name
    elif not any(
        each.action == "added"
        and each.type == change.type
        and all(old[key] == each.new_properties.get(key) for key in same)
        for each in changes
    ):
        yield f"{what} {how}", "keep it: a run may burn money unnoticed", name


def _deaf(change: Change, base: Side, head: Side) -> _Weakened:
    """Find a rule that no longer matches what it did, and a clock that goes slower."""
    old, new = change.old_properties, change.new_properties
    if change.type != "AWS::Events::Rule" or not (old and new):
        return
    name, what, _ = _watcher(change, base)
    before, after = (_heard(each.get("EventPattern", {})) for each in (old, new))
    lost = [f"{path} {value}" for path, values in before.items()
            for value in sorted(values - after.get(path, values if after else set()))]  # fmt: skip
    lost += [f"events without {path}" for path in sorted(after.keys() - before) if before]
    if name and lost:
        yield f"{what} no longer hears {short(lost)}", "keep it", name
    was, comes = (each.get("ScheduleExpression", "") for each in (old, new))
    # With a deadline, the Guard is called more often.
    eased = has_deadline(base.stacks[change.stack]) > has_deadline(head.stacks[change.stack])
    if name and was != comes and _minutes(comes) > _minutes(was) and not eased:
        yield f"{what}: {was} becomes {comes}", f"keep {was}", name


def _heard(pattern: Any, path: str = "") -> dict[str, set[str]]:
    """Return the values that a pattern accepts, by the path of the event's field."""
    if not isinstance(pattern, Mapping):
        return {path: {spell(each) for each in as_list(pattern)}}
    return {
        key: values
        for name, inner in pattern.items()
        for key, values in _heard(inner, f"{path}.{name}".strip(".")).items()
    }


def _minutes(expression: str) -> float:
    """Return the time between two calls; a schedule that is no rate counts as the slowest."""
    found = re.fullmatch(r"rate\((\d+) (minute|hour|day)s?\)", spell(expression))
    return float(found[1]) * _MINUTES[found[2]] if found else math.inf


def _unheard(change: Change, head: Side) -> _Weakened:
    """Find a topic that lost its last subscriber."""
    topic = change.old_properties.get("TopicArn")
    if change.type != "AWS::SNS::Subscription" or change.action != "removed":
        return
    subscriptions = head.stacks[change.stack].of_type(change.type)
    if not any(each["TopicArn"] == topic for each in subscriptions):
        who = spell(change.old_properties.get("Endpoint", ""))
        instead = "keep it (alarm.email), or name another address"
        yield f"{who} no longer gets the alarms, and nobody else does", instead, "alarms"


def _works(acts: str, properties: Mapping[str, Any]) -> bool:
    return bool(properties.get(acts)) and not (
        properties.get("ActionsEnabled") is False
        or properties.get("State") == "DISABLED"
        or properties.get("ReservedConcurrentExecutions") == 0
    )


def _open(change: Change, head: Side) -> _Weakened:
    """Find credentials that a plain request can get, and what is open to anyone."""
    old, new = change.old_properties, change.new_properties
    if change.type == "AWS::EC2::LaunchTemplate" and new and not _wants_token(new):
        if not old or _wants_token(old):
            what = "the instance metadata, credentials included, is open to IMDSv1"
            yield what, "keep HttpTokens: required", "imdsv1"
    elif change.type == "AWS::S3::Bucket" and change.action != "removed":
        before, after = ((each.get(_BLOCKS) or {}) for each in (old, new))
        gone = [name for name, value in before.items() if value is True and not after.get(name)]
        if gone:
            yield f"the bucket loses {', '.join(gone)}", "keep it", "public"
    name = DOCUMENTS.get(change.type, "PolicyDocument")
    before, after = (permissions(_public(each.get(name))) for each in (old, new))
    # An endpoint is open to its network, if nobody narrows it.
    found = sentences(after - before) if change.type != "AWS::EC2::VPCEndpoint" else []
    for path, _, value in change.differences():
        if "Egress" not in change.type + path and _DOORS.search(f"{path} {value}"):
            found.append(f"{path} {value}")
    what = {"AWS::S3::BucketPolicy": "bucket"}.get(change.type, change.type.rpartition("::")[2])
    blocked = what == "bucket" and _blocks_policies(change, head)
    how = " (S3 will refuse it: the bucket blocks public policies)" if blocked else ""
    for sentence in found:
        yield f"the {what} is open to anyone: {sentence}{how}", "name who may use it", "public"


def _wants_token(template: Mapping[str, Any]) -> bool:
    data = template.get("LaunchTemplateData") or {}
    return (data.get("MetadataOptions") or {}).get("HttpTokens") == "required"


def _public(document: Any) -> dict[str, Any]:
    """Return the document with only the statements that S3 calls public."""
    document = json.loads(document) if isinstance(document, str) else document or {}
    return {"Statement": [each for each in as_list(document.get("Statement")) if _is_public(each)]}


def _is_public(statement: Mapping[str, Any]) -> bool:
    if statement.get("Effect") != "Allow":
        return False
    given = statement.get("Principal", {"AWS": "*"} if "NotPrincipal" in statement else None)
    if "*" not in json.dumps(given):
        return False
    return not any(
        _NARROWING.fullmatch(key) and "*" not in spell(value)
        for operator, keys in (statement.get("Condition") or {}).items()
        if not re.search("Not|^Fn::|IfExists$", operator)
        for key, value in keys.items()
    )


def _blocks_policies(policy: Change, head: Side) -> bool:
    resources = head.stacks[policy.stack].resources
    buckets = [name for name, _ in references(policy.new_properties.get("Bucket"))]
    properties = [(resources.get(name) or {}).get("Properties") or {} for name in buckets]
    return any((each.get(_BLOCKS) or {}).get("BlockPublicPolicy") is True for each in properties)
