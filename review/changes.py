"""The resources CloudFormation would add, change, replace or remove, by AWS's resource schemas."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from embedded_aws import create_only_values, is_disputed, references, replacing_paths
from review.assembly import NESTED, Side, StackSide
from review.spelling import leaves, path_of, spell

Action = Literal["added", "changed", "may be replaced", "replaced", "removed"]
Kind = Literal[
    "drift", "loss", "boot", "weakened", "refused", "data", "security", "run", "alarm", "stack",
    "resource", "cost",
]  # fmt: skip
_DISPUTED = "; AWS's documents disagree on whether that replaces it"
_EMPTY = StackSide(template={})


@dataclass(frozen=True, slots=True)
class Effect:
    """One thing that a deploy does: a row of the comment, and what its headline counts."""

    kind: Kind
    what: str
    instead: str = ""
    accept: str = ""  # the name without which the review fails, if it can be accepted
    stack: str = ""
    path: str = ""
    action: str = ""  # of a resource's change or of a permission's


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One resource that differs; for a replacement, `why` names the property that forces it."""

    stack: str
    logical_id: str
    path: str
    type: str
    action: Action
    old: Mapping[str, Any] | None
    new: Mapping[str, Any] | None
    why: str = ""

    @property
    def old_properties(self) -> Mapping[str, Any]:
        return (self.old or {}).get("Properties") or {}

    @property
    def new_properties(self) -> Mapping[str, Any]:
        return (self.new or {}).get("Properties") or {}

    def effect(self, kind: Kind, what: str, instead: str = "", accept: str = "") -> Effect:
        """Return an effect of this change."""
        return Effect(kind, what, instead, accept, self.stack, self.path)

    def differences(self) -> list[tuple[str, Any, Any]]:
        """List the property paths that differ, with their values before and after."""
        old, new = dict(leaves(self.old_properties)), dict(leaves(self.new_properties))
        return [
            (path, old.get(path), new.get(path))
            for path in dict.fromkeys([*old, *new])
            if old.get(path) != new.get(path)
        ]


def find_changes(base: Side, head: Side) -> list[Change]:
    """Compare head's stacks with base's; a stack that only base has is not touched."""
    return [
        change
        for name in sorted(head.stacks)
        for change in _stack_changes(name, base.stacks.get(name, _EMPTY), head.stacks[name])
    ]


def _parts(side: StackSide) -> dict[str, Any]:
    """Return a stack's resources, and as one more what it declares besides them."""
    kept = {"Resources", "Outputs", "Metadata", "Rules"}  # plain outputs only inform
    properties = {name: each for name, each in side.template.items() if name not in kept}
    properties |= {"exports": exports_of(side), "TerminationProtection": side.is_protected}
    itself = {"Type": NESTED, "Properties": properties,
              "Metadata": {"aws:cdk:path": "/(the stack)"}}  # fmt: skip
    return {**side.resources, "(the stack)": itself} if side.template else {}


def exports_of(side: StackSide) -> dict[str, Any]:
    """Return the values that a stack exports, by name."""
    outputs = (side.template.get("Outputs") or {}).values()
    return {spell(each["Export"]["Name"]): each["Value"] for each in outputs if "Export" in each}


def imports_of(node: Any) -> Iterator[str]:
    """Yield the names that a part of a template imports."""
    for item in node if isinstance(node, list) else node.values() if isinstance(node, dict) else ():
        yield from imports_of(item)
    if isinstance(node, dict) and "Fn::ImportValue" in node:
        yield spell(node["Fn::ImportValue"])


def _stack_changes(stack: str, base: StackSide, head: StackSide) -> list[Change]:
    before, after = _parts(base), _parts(head)
    replaced = _replacements(before, after)
    changes = []
    for logical_id in sorted({*before, *after}):
        old, new = before.get(logical_id), after.get(logical_id)
        if old is not None and new is not None:
            if logical_id not in replaced and _same(old, new):
                continue
            action: Action = "changed"
            if logical_id in replaced:
                disputed = replaced[logical_id].endswith(_DISPUTED)
                action = "may be replaced" if disputed else "replaced"
        else:
            action = "added" if old is None else "removed"
        shown = new if new is not None else old
        assert shown is not None
        changes.append(
            Change(
                stack=stack,
                logical_id=logical_id,
                path=path_of(logical_id, shown),
                type=shown["Type"],
                action=action,
                old=old,
                new=new,
                why=replaced.get(logical_id, ""),
            )
        )
    return changes


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    # Metadata is CDK's own: paths and asset folders.
    keys = ({*old} | {*new}) - {"Metadata"}
    return all(old.get(key) == new.get(key) for key in keys)


def _replacements(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason for each replacement, by logical id."""
    why = {}
    for name in old.keys() & new.keys():
        if old[name]["Type"] != new[name]["Type"]:
            why[name] = f"its type was {old[name]['Type']}"
            continue
        paths = replacing_paths(
            new[name]["Type"], old[name].get("Properties") or {}, new[name].get("Properties") or {}
        )
        if paths:
            named, type_ = ", ".join(".".join(path) for path in paths), new[name]["Type"]
            verb = " change" if paths[1:] else " changes"
            disputed = is_disputed(type_, paths)
            why[name] = named + (f"{verb}{_DISPUTED}" if disputed else " cannot be updated")
    # A changed launch template gets a new version, which its fleet names.
    versions = {
        name: ""
        for name in old.keys() & new.keys()
        if new[name]["Type"] == "AWS::EC2::LaunchTemplate" and not _same(old[name], new[name])
    }
    for name in old.keys() & new.keys():
        for path, template in _names_replaced(new[name], versions):
            why.setdefault(name, f"{path} names a version of {template}, which changes{_DISPUTED}")
    # A resource that names a replaced one in a property that cannot be updated is replaced too.
    waiting = (old.keys() & new.keys()) - why.keys()
    while found := {
        name: f"{path} names {culprit}, which is replaced"
        for name in waiting
        for path, culprit in _names_replaced(new[name], why)
    }:
        why.update(found)
        waiting -= found.keys()
    return why


def _names_replaced(
    resource: Mapping[str, Any], replaced: Mapping[str, str]
) -> list[tuple[str, str]]:
    properties = resource.get("Properties") or {}
    return [
        (".".join(path), name)
        for path, value in create_only_values(resource["Type"], properties)
        for name, _ in references(value)
        if name in replaced
    ]
