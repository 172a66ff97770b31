"""A template's values as readable text: intrinsic functions in short form."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_CHARACTERS = 120


def spell(value: Any) -> str:
    """Return a value as text, with ${LogicalId.Attribute} for what CloudFormation fills in."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping) and len(value) == 1:
        name, argument = next(iter(value.items()))
        if name == "Ref":
            return f"${{{argument}}}"
        if name == "Fn::GetAtt":
            parts = argument if isinstance(argument, list) else [argument]
            return "${" + ".".join(map(str, parts)) + "}"
        if name == "Fn::Join":
            return str(argument[0]).join(map(spell, argument[1]))
        if name == "Fn::Sub":
            return str(argument[0] if isinstance(argument, list) else argument)
        if name == "Fn::Base64":
            return spell(argument)
        if name == "Fn::ImportValue":
            # CDK's export names: STACK:ExportsOutputRefNAMEHASH.
            return "${" + re.sub(r":ExportsOutput(Ref|FnGetAtt)", ".", spell(argument)) + "}"
    if isinstance(value, list):
        return ", ".join(map(spell, value))
    return json.dumps(value, sort_keys=True)


def short(value: Any) -> str:
    """Return a value as text that fits into a table."""
    if value is None:
        return "-"
    text = " ".join(spell(value).split())
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


def path_of(logical_id: str, resource: Mapping[str, Any]) -> str:
    """Return a resource's construct path without its stack, as the CDK CLI shows it."""
    path = str((resource.get("Metadata") or {}).get("aws:cdk:path", logical_id))
    parts = path.split("/")[1:] if "/" in path else [path]
    if len(parts) > 1 and parts[-1] in ("Resource", "Default"):
        parts.pop()
    return "/".join(parts)


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value, such as an intrinsic function, as its item."""
    return value if isinstance(value, list) else [] if value is None else [value]


def number(value: object, unknown: float = 0.0) -> float:
    """Return a number of a template; `unknown` where only a deploy knows it, as for a Ref."""
    is_known = re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", str(value))
    return float(str(value)) if is_known else unknown


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield a property tree's (path, value) pairs; intrinsics and lists of text are leaves."""
    if isinstance(value, Mapping) and not _is_intrinsic(value):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            # A tag, a rule or a metric that moves within its list is the same.
            names = [item.get(each) for each in ("Key", "Id")] if isinstance(item, Mapping) else []
            named = next((name for name in names if isinstance(name, str)), str(index))
            yield from leaves(item, (*path, named))
    else:
        yield ".".join(path), value


def _is_intrinsic(value: Mapping[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith(("Fn::", "Ref"))
