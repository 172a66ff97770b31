"""Who may do more or less than before: statements, network rules, encryption, metadata access."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from review.changes import Change
from review.spelling import short, spell

Effect = Literal["widens", "narrows", "changes"]
# Where a policy document stands, by resource type.
_DOCUMENTS = {
    "AWS::IAM::Policy": ("PolicyDocument",),
    "AWS::IAM::ManagedPolicy": ("PolicyDocument",),
    "AWS::IAM::Role": ("AssumeRolePolicyDocument",),
    "AWS::S3::BucketPolicy": ("PolicyDocument",),
    "AWS::SNS::TopicPolicy": ("PolicyDocument",),
    "AWS::SQS::QueuePolicy": ("PolicyDocument",),
    "AWS::KMS::Key": ("KeyPolicy",),
    "AWS::EC2::VPCEndpoint": ("PolicyDocument",),
    "AWS::Logs::ResourcePolicy": ("PolicyDocument",),
    "AWS::SecretsManager::ResourcePolicy": ("ResourcePolicy",),
}
# Lists whose items each open something.
_OPENINGS = {
    "AWS::IAM::Role": ("ManagedPolicyArns",),
    "AWS::EC2::SecurityGroup": ("SecurityGroupIngress", "SecurityGroupEgress"),
}
# Resources that are nothing but an opening.
_WHOLE = (
    "AWS::EC2::SecurityGroupIngress",
    "AWS::EC2::SecurityGroupEgress",
    "AWS::Lambda::Permission",
    "AWS::Lambda::Url",
    "AWS::IAM::AccessKey",
)
# Properties that protect, by type; part of a path is enough.
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
}
# Whose removal or arrival is a matter of security by itself.
_GUARDS = ("AWS::EC2::FlowLog", "AWS::S3::BucketPolicy", "AWS::SNS::TopicPolicy")


@dataclass(frozen=True, kw_only=True, slots=True)
class SecurityChange:
    """One statement, rule or protection that came, went or changed."""

    stack: str
    path: str
    effect: Effect
    what: str


def find_security_changes(changes: Sequence[Change]) -> list[SecurityChange]:
    """List what changes for permissions and protections, what widens first."""
    found = [item for change in changes for item in _of(change)]
    order = {"widens": 0, "changes": 1, "narrows": 2}
    return sorted(found, key=lambda item: (order[item.effect], item.stack, item.path))


def _of(change: Change) -> Iterator[SecurityChange]:
    for name in _DOCUMENTS.get(change.type, ()):
        old, new = (_statements(each.get(name)) for each in _both(change))
        if old or new:
            yield from _statement_changes(change, old, new)
    if change.type == "AWS::IAM::Role":
        old, new = (_inline(each) for each in _both(change))
        yield from _statement_changes(change, old, new)
    for name in _OPENINGS.get(change.type, ()):
        old, new = (_canonical(each.get(name) or []) for each in _both(change))
        yield from _set_changes(change, old, new, name)
    if change.type in _WHOLE:
        old, new = (_canonical([each] if each else []) for each in _both(change))
        yield from _set_changes(change, old, new, change.type.rpartition("::")[2])
    if change.action in ("changed", "replaced"):
        for path, before, after in change.differences():
            if any(name in path.split(".") for name in _PROTECTIONS.get(change.type, ())):
                what = f"{path}: {short(before)} → {short(after)}"
                yield _security_change(change, "changes", what)
    if change.type in _GUARDS and change.action in ("added", "removed"):
        name = change.type.rpartition("::")[2]
        effect: Effect = "narrows" if change.action == "added" else "widens"
        yield _security_change(change, effect, f"the {name} is {change.action}")


def _both(change: Change) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return change.old_properties, change.new_properties


def _statements(document: Any) -> dict[str, Mapping[str, Any]]:
    """Statements by their canonical text; a document may be JSON in a text."""
    if isinstance(document, str):
        document = json.loads(document)
    if not isinstance(document, Mapping):
        return {}
    if "Statement" not in document:
        # Built with an intrinsic function: it is one opening as a whole.
        return {json.dumps(document, sort_keys=True): {"Effect": "Allow", "Action": document}}
    statements = document["Statement"]
    listed = statements if isinstance(statements, list) else [statements]
    return {json.dumps(_normal(each), sort_keys=True): each for each in listed}


def _inline(role: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for policy in role.get("Policies") or []:
        found |= _statements(policy.get("PolicyDocument"))
    return found


def _normal(statement: Mapping[str, Any]) -> dict[str, Any]:
    """A statement with its lists in order, so that order alone is no difference."""
    answer: dict[str, Any] = {}
    for key, value in statement.items():
        if key == "Sid":
            continue
        listed = value if isinstance(value, list) else [value]
        answer[key] = sorted(json.dumps(item, sort_keys=True) for item in listed)
    return answer


def _statement_changes(
    change: Change, old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> Iterator[SecurityChange]:
    for key in old.keys() - new.keys():
        is_deny = old[key].get("Effect") == "Deny"
        yield _security_change(
            change, "widens" if is_deny else "narrows", f"− {_sentence(old[key])}"
        )
    for key in new.keys() - old.keys():
        is_deny = new[key].get("Effect") == "Deny"
        yield _security_change(
            change, "narrows" if is_deny else "widens", f"+ {_sentence(new[key])}"
        )


def _sentence(statement: Mapping[str, Any]) -> str:
    parts = [str(statement.get("Effect", "Allow"))]
    for key, word in (
        ("Principal", "to"),
        ("Action", ""),
        ("NotAction", "all but"),
        ("Resource", "on"),
        ("NotResource", "on all but"),
        ("Condition", "if"),
    ):
        if key in statement:
            value = statement[key]
            text = ", ".join(map(spell, value)) if isinstance(value, list) else spell(value)
            parts.append(f"{word} {text}".strip())
    return " ".join(parts)


def _canonical(items: Sequence[Any]) -> dict[str, Any]:
    listed = items if isinstance(items, list) else [items]
    return {json.dumps(item, sort_keys=True): item for item in listed}


def _set_changes(
    change: Change, old: Mapping[str, Any], new: Mapping[str, Any], name: str
) -> Iterator[SecurityChange]:
    for key in old.keys() - new.keys():
        yield _security_change(change, "narrows", f"− {name}: {spell(old[key])}")
    for key in new.keys() - old.keys():
        yield _security_change(change, "widens", f"+ {name}: {spell(new[key])}")


def _security_change(change: Change, effect: Effect, what: str) -> SecurityChange:
    return SecurityChange(stack=change.stack, path=change.path, effect=effect, what=what)
