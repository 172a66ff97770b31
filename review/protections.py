"""The protections a deploy would remove: alarms, the Guard, its clock, IMDSv2, closed buckets.

Each has a name; one that is not accepted by name (--accept NAME) makes the review fail.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedded_aws import references
from review.assembly import Side
from review.changes import Change, Objection
from review.security import permissions, sentences
from review.spelling import spell

PROTECTIONS = ("alarms", "guard", "imdsv1", "public")
# The name for --accept, the wording, and the property without which it does nothing.
_WATCHERS = {
    "AWS::CloudWatch::Alarm": ("alarms", "the alarm", "AlarmActions"),
    "AWS::Events::Rule": ("guard", "the clock that calls the Guard", "Targets"),
    "AWS::Lambda::Function": ("guard", "the function that stops a run", "Code"),
}
# S3 does not call a statement public if it fixes the value of one of these: docs.aws.amazon.com/
# AmazonS3/latest/userguide/access-control-block-public-access.html, "The meaning of public".
_NARROWING = re.compile(
    "aws:(PrincipalOrgID|PrincipalOrgPaths|PrincipalArn|PrincipalAccount|SourceIp|SourceArn|"
    "SourceVpce?|SourceOwner|SourceAccount|userid)|s3:DataAccessPoint(Arn|Account)",
    re.IGNORECASE,
)
_BLOCKS = "PublicAccessBlockConfiguration"


def find_weakened(head: Side, changes: Sequence[Change]) -> list[Objection]:
    """List the protections that a deploy takes away, each with the name that accepts it."""
    return [
        each
        for change in changes
        for each in (*_idle(change, changes), *_unheard(change, head), *_open(change, head))
    ]


def _idle(change: Change, changes: Sequence[Change]) -> Iterator[Objection]:
    """Find alarms, clocks and functions that no longer do anything."""
    name, what, acts = _WATCHERS.get(change.type, ("", "", ""))
    old, new = change.old_properties, change.new_properties
    if not _works(acts, old) or (acts == "Targets" and "ScheduleExpression" not in old):
        return
    how = f"has no {acts}" if new and not new.get(acts) else "is disabled" if new else "is removed"
    # The same handler, or the same properties, may do the job under another logical id.
    same = ["Handler"] if "Handler" in old else [key for key in old if "Description" not in key]
    if not _works(acts, new) and not any(
        each.action == "added"
        and each.type == change.type
        and all(old[key] == each.new_properties.get(key) for key in same)
        for each in changes
    ):
        yield change.objection(f"{what} {how}", "keep it: a run may burn money unnoticed", name)


def _unheard(change: Change, head: Side) -> Iterator[Objection]:
    """Find a topic that lost its last subscriber."""
    topic = change.old_properties.get("TopicArn")
    if change.type != "AWS::SNS::Subscription" or change.action != "removed":
        return
    subscriptions = head.stacks[change.stack].of_type(change.type)
    if not any(each["TopicArn"] == topic for each in subscriptions):
        who = spell(change.old_properties.get("Endpoint", ""))
        yield change.objection(
            f"{who} no longer gets the alarms, and nobody else does",
            "keep it (alarm.email), or name another address",
            "alarms",
        )


def _works(acts: str, properties: Mapping[str, Any]) -> bool:
    return bool(properties.get(acts)) and not (
        properties.get("ActionsEnabled") is False
        or properties.get("State") == "DISABLED"
        or properties.get("ReservedConcurrentExecutions") == 0
    )


def _open(change: Change, head: Side) -> Iterator[Objection]:
    """Find credentials that a plain request can get, and buckets open to anyone."""
    old, new = change.old_properties, change.new_properties
    if change.type == "AWS::EC2::LaunchTemplate" and new and not _wants_token(new):
        if not old or _wants_token(old):
            yield change.objection(
                "the instance metadata, credentials included, is open to IMDSv1",
                "keep HttpTokens: required",
                "imdsv1",
            )
    elif change.type == "AWS::S3::Bucket" and change.action != "removed":
        before, after = ((each.get(_BLOCKS) or {}) for each in (old, new))
        gone = [name for name, value in before.items() if value is True and not after.get(name)]
        if gone:
            yield change.objection(f"the bucket loses {', '.join(gone)}", "keep it", "public")
    elif change.type == "AWS::S3::BucketPolicy" and new:
        public = permissions(_public(new)) - permissions(_public(old))
        for sentence in sentences(public):
            what = f"the bucket is open to anyone: {sentence}"
            if _blocks_policies(change, head):
                what += " (S3 will refuse it: the bucket blocks public policies)"
            yield change.objection(what, "name who may use it", "public")


def _wants_token(template: Mapping[str, Any]) -> bool:
    data = template.get("LaunchTemplateData") or {}
    return (data.get("MetadataOptions") or {}).get("HttpTokens") == "required"


def _public(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with only the statements that S3 calls public."""
    document = policy.get("PolicyDocument") or {}
    statements = document.get("Statement") or []
    listed = statements if isinstance(statements, list) else [statements]
    return {"Statement": [each for each in listed if _is_public(each)]}


def _is_public(statement: Mapping[str, Any]) -> bool:
    if statement.get("Effect") != "Allow":
        return False
    given = statement.get("Principal", {"AWS": "*"} if "NotPrincipal" in statement else None)
    if "*" not in json.dumps(given):
        return False
    return not any(
        _NARROWING.fullmatch(key) and "*" not in spell(value)
        for operator, keys in (statement.get("Condition") or {}).items()
        if "Not" not in operator and not operator.endswith("IfExists")
        for key, value in keys.items()
    )


def _blocks_policies(policy: Change, head: Side) -> bool:
    resources = head.stacks[policy.stack].resources
    buckets = [name for name, _ in references(policy.new_properties.get("Bucket"))]
    properties = [(resources.get(name) or {}).get("Properties") or {} for name in buckets]
    return any((each.get(_BLOCKS) or {}).get("BlockPublicPolicy") is True for each in properties)
