"""Policy documents as sets of single permissions: rearranged statements do not differ."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from review.spelling import spell


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Permission:
    """One action on one resource for one principal, spelled for people."""

    effect: str
    principal: str
    condition: str
    resource: str
    action: str


def permissions(document: Any) -> set[Permission]:
    """Split a document, also one given as JSON text, into single permissions."""
    if isinstance(document, str):
        document = json.loads(document)
    if not isinstance(document, Mapping):
        return set()
    if "Statement" not in document:
        # Built with an intrinsic function: the whole is one permission.
        return {Permission(effect="Allow", principal="", condition="", resource="",
                           action=spell(document))}  # fmt: skip
    return {each for statement in _listed(document["Statement"]) for each in _of(statement)}


def _of(statement: Mapping[str, Any]) -> Iterator[Permission]:
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
                yield from (f"{negation}{kind} {spell(name)}" for name in _listed(names))
        elif given is not None:
            yield f"{negation}{spell(given)}"
    if "Principal" not in statement and "NotPrincipal" not in statement:
        yield ""


def _either(statement: Mapping[str, Any], name: str, inverse: str, negation: str) -> list[str]:
    if name in statement:
        return [spell(each) for each in _listed(statement[name])]
    # The meaning of NotAction depends on all its items together.
    return [negation + spell(_listed(statement[inverse]))] if inverse in statement else [""]


def sentences(found: Iterable[Permission]) -> list[str]:
    """Describe permissions in few sentences, grouping those that share everything else."""
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


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
