"""Random policies and calls for the judges, and the short way to rule on one of ours."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from embedded_aws.iam.evaluation import (
    BOUNDARY,
    IDENTITY,
    RESOURCE,
    ApiCall,
    Caller,
    Ruling,
    evaluate,
    read_policy,
)

ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/Trainer"
ARN = f"arn:aws:sts::{ACCOUNT}:assumed-role/Trainer/i-1"
USER = f"arn:aws:iam::{ACCOUNT}:user/someone"
BUCKET = "arn:aws:s3:::runs"
ACTIONS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket")
RESOURCES = (BUCKET, f"{BUCKET}/a/1", f"{BUCKET}/b/head.json", "arn:aws:s3:::other/a/1")
_ACTION_PATTERNS = (*ACTIONS, "s3:*", "*", "s3:Get*", "S3:putobject", "s3:?etObject")
_RESOURCE_PATTERNS = (
    *RESOURCES,
    "*",
    f"{BUCKET}/*",
    f"{BUCKET}/?/*",
    f"{BUCKET}/${{aws:username}}/*",
)
_CONTEXT: Mapping[str, Sequence[Any]] = {
    "aws:username": ("a", "b"),
    "aws:SecureTransport": ("true", "false"),
    "s3:TlsVersion": ("1.1", "1.3"),
    "s3:prefix": ("a/", "b/", "A/"),
    "aws:SourceArn": (f"arn:aws:ec2:us-east-1:{ACCOUNT}:instance/i-1", "arn:aws:sns:::x"),
    "aws:TagKeys": (["Stack"], ["Stack", "RunId"], []),
}
_CONDITIONS: Sequence[tuple[str, str, Any]] = (
    *((f"String{name}{end}", "s3:prefix", ["a/", "c/"])
      for name in ("Equals", "NotEquals", "EqualsIgnoreCase", "NotEqualsIgnoreCase", "Like",
                   "NotLike")
      for end in ("", "IfExists")),
    ("StringLike", "s3:prefix", "?/"),
    ("StringEquals", "s3:prefix", "${aws:username}/"),
    ("StringLike", "s3:prefix", "${aws:username}*"),
    *((f"Bool{end}", "aws:SecureTransport", value)
      for end in ("", "IfExists") for value in (True, "false")),
    *((f"Numeric{name}", "s3:TlsVersion", 1.2)
      for name in ("Equals", "NotEquals", "LessThan", "LessThanEquals", "GreaterThan",
                   "GreaterThanEquals")),
    *((f"Arn{name}", "aws:SourceArn", f"arn:aws:ec2:*:{ACCOUNT}:instance/*")
      for name in ("Like", "NotLike", "Equals", "NotEquals", "LikeIfExists")),
    *((f"For{which}:String{name}", "aws:TagKeys", ["Stack", "Name"])
      for which in ("AllValues", "AnyValue") for name in ("Equals", "NotEquals", "Like")),
    ("Null", "s3:prefix", True), ("Null", "s3:prefix", "false"),
)  # fmt: skip


def document(*statements: Mapping[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def allow(action: Any = "*", resource: Any = "*", **more: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **more}


def deny(action: Any = "*", resource: Any = "*", **more: Any) -> dict[str, Any]:
    return {**allow(action, resource, **more), "Effect": "Deny"}


def rule(case: Mapping[str, Any]) -> Ruling:
    """Rule on a case: `request` as the judge has it, and policies by kind."""
    request = case["request"]
    context = {key.lower(): tuple(value) if isinstance(value, list) else value
               for key, value in request["contextVariables"].items()}  # fmt: skip
    principal = request["principal"]
    is_session = ":assumed-role/" in principal
    caller = Caller(
        arn=principal,
        kind="AssumedRole" if is_session else "User",
        account=principal.split(":")[4],
        role=f"arn:aws:iam::{principal.split(':')[4]}:role/Trainer" if is_session else "",
    )
    call = ApiCall(
        action=request["action"],
        resource=request["resource"]["resource"],
        keys=context,
    )
    read = {
        kind: [read_policy(kind, kind, json.dumps(each)) for each in case.get(kind, [])]
        for kind in (IDENTITY, BOUNDARY, RESOURCE)
    }
    return evaluate(
        caller, call, identity=read[IDENTITY], boundary=read[BOUNDARY], resource=read[RESOURCE]
    )


def request(action: str, resource: str, *, principal: str = ARN, **context: Any) -> dict[str, Any]:
    return {
        "principal": principal,
        "action": action,
        "resource": {"resource": resource, "accountId": ACCOUNT},
        "contextVariables": context,
    }


def random_case(dice: random.Random, *, conditions: bool = True, resource: bool = True) -> Any:
    """Make one case; a third of the calls meet each optional kind of policy."""
    case: dict[str, Any] = {
        "request": request(
            dice.choice(ACTIONS),
            dice.choice(RESOURCES),
            principal=dice.choice((ARN, ARN, USER)) if resource else ARN,
        ),
        IDENTITY: [_random_policy(dice, conditions=conditions) for _ in range(dice.randint(1, 2))],
    }
    if conditions:
        case["request"]["contextVariables"] = {
            key: dice.choice(values) for key, values in _CONTEXT.items() if dice.random() < 0.6
        }
    if resource:
        for kind in (BOUNDARY, RESOURCE):
            if dice.random() < 0.35:
                case[kind] = [_random_policy(dice, conditions=conditions, named=kind == RESOURCE)]
    return case


def _random_policy(dice: random.Random, *, conditions: bool, named: bool = False) -> dict[str, Any]:
    return document(
        *(
            _random_statement(dice, conditions=conditions, named=named)
            for _ in range(dice.randint(1, 3))
        )
    )


def _random_statement(dice: random.Random, *, conditions: bool, named: bool) -> dict[str, Any]:
    def some(patterns: Sequence[str]) -> list[str]:
        return dice.sample(patterns, dice.randint(1, 2))

    is_odd = dice.random() < 0.15 and conditions
    made: dict[str, Any] = {
        "Effect": "Deny" if dice.random() < 0.2 else "Allow",
        "NotAction" if is_odd else "Action": some(_ACTION_PATTERNS),
        "NotResource" if dice.random() < 0.1 and conditions else "Resource": some(
            _RESOURCE_PATTERNS if conditions else _RESOURCE_PATTERNS[:-1]
        ),
    }
    if named:
        made["Principal"] = dice.choice(
            ("*", {"AWS": ROLE}, {"AWS": [ARN]}, {"AWS": ACCOUNT},
             {"AWS": f"arn:aws:iam::{ACCOUNT}:root"}, {"AWS": USER},
             {"Service": "ec2.amazonaws.com"})
        )  # fmt: skip
    if conditions and dice.random() < 0.4:
        operator, key, value = dice.choice(_CONDITIONS)
        made["Condition"] = {operator: {key: value}}
    return made
