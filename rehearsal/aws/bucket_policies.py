"""Bucket policies evaluated as by S3, for statements about everybody.

Conditions support the operators and keys below; a statement with any other applies to nobody.
"""

import fnmatch
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from moto.iam.access_control import PermissionResult
from moto.s3.exceptions import S3ClientError

# The condition keys of the current request, in lower case.
REQUEST: ContextVar[Mapping[str, str]] = ContextVar("REQUEST", default={})  # noqa: B039
_HEADERS = {
    "HTTP_IF_MATCH": "s3:if-match",
    "HTTP_IF_NONE_MATCH": "s3:if-none-match",
    "HTTP_X_AMZ_SERVER_SIDE_ENCRYPTION": "s3:x-amz-server-side-encryption",
    "HTTP_X_AMZ_ACL": "s3:x-amz-acl",
}


class AccessDenied(S3ClientError):
    """S3's error when a bucket policy denies an action."""

    code = 403  # type: ignore[assignment]  # as moto's own errors of S3 have it

    def __init__(self, action: str, resource: str) -> None:
        super().__init__(
            "AccessDenied",
            f"User is not authorized to perform: {action} on resource: {resource} with an explicit "
            "deny in a resource-based policy",
        )


def condition_keys(environ: Mapping[str, Any]) -> dict[str, str]:
    """Return the condition keys of a request. The local connection counts as TLS 1.3."""
    keys = {"aws:securetransport": "true", "s3:tlsversion": "1.3"}
    return keys | {key: environ[name] for name, key in _HEADERS.items() if name in environ}


def bucket_permission(bucket: Any, action: str, resource: str) -> PermissionResult:
    """Return what a bucket's policy says of an action; raise if it denies it to everybody."""
    if bucket.policy is None:
        return PermissionResult.NEUTRAL
    statements = json.loads(bucket.policy)["Statement"]
    statements = statements if isinstance(statements, list) else [statements]
    applying = [item for item in statements if _applies(item, action, resource)]
    if any(item["Effect"] == "Deny" for item in applying):
        raise AccessDenied(action, resource)
    return PermissionResult.PERMITTED if applying else PermissionResult.NEUTRAL


def _applies(statement: Mapping[str, Any], action: str, resource: str) -> bool:
    return (
        statement.get("Principal") in ("*", {"AWS": "*"}, {"AWS": ["*"]})
        and _matches(statement.get("Action", []), action)
        and _matches(statement.get("Resource", []), resource)
        and _conditions_hold(statement.get("Condition", {}))
    )


def _matches(patterns: str | list[str], value: str) -> bool:
    items = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(value, item) for item in items)


def _conditions_hold(conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    request = REQUEST.get()
    for operator, wanted in conditions.items():
        holds = _OPERATORS.get(operator)
        if holds is None:
            return False
        for key, values in wanted.items():
            expected = [str(item) for item in (values if isinstance(values, list) else [values])]
            if not holds(request.get(key.lower()), expected):
                return False
    return True


def _null(actual: str | None, expected: list[str]) -> bool:
    return str(actual is None).lower() in [item.lower() for item in expected]


def _bool(actual: str | None, expected: list[str]) -> bool:
    return actual is not None and actual.lower() in [item.lower() for item in expected]


def _equals(actual: str | None, expected: list[str]) -> bool:
    return actual is not None and actual in expected


def _differs(actual: str | None, expected: list[str]) -> bool:
    return actual not in expected


def _less_than(actual: str | None, expected: list[str]) -> bool:
    return actual is not None and any(float(actual) < float(item) for item in expected)


_OPERATORS: dict[str, Callable[[str | None, list[str]], bool]] = {
    "Null": _null,
    "Bool": _bool,
    "StringEquals": _equals,
    "StringNotEquals": _differs,
    "NumericLessThan": _less_than,
}
