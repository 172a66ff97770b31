"""Deploys of a valid template that CloudFormation would refuse, or that would fail half-way."""

from collections.abc import Iterator, Sequence
from typing import Any

from cloudformation import schema
from cloudformation.template import references
from review.assembly import Side
from review.changes import Change, Objection
from review.spelling import spell


def find_refusals(base: Side, head: Side, changes: Sequence[Change]) -> list[Objection]:
    """List what would make a deploy of head over base fail."""
    return [
        *(refusal for change in changes for refusal in _of_change(change)),
        *_names_taken(changes),
        *_exports_in_use(base, head, changes),
    ]


def _of_change(change: Change) -> Iterator[Objection]:
    if change.action != "replaced" or change.old is None:
        return
    if change.old["Type"] != change.type:
        yield change.objection(
            what=f"a resource cannot become another type ({change.old['Type']} → {change.type})",
            instead="give it another id",
        )
    name = schema.custom_name(change.type, change.new_properties)
    if name and name == schema.custom_name(change.type, change.old_properties):
        yield change.objection(
            what=f"it is replaced, and the template names it {name}: the new one is created before "
            "the old one is deleted, and the name is taken",
            instead="change the name as well",
        )


def _names_taken(changes: Sequence[Change]) -> Iterator[Objection]:
    """Find names that move to another logical id: both resources would exist at once."""
    had = {
        (change.type, name): change
        for change in changes
        if change.action == "removed"
        and (name := schema.custom_name(change.type, change.old_properties))
    }
    for change in changes:
        name = schema.custom_name(change.type, change.new_properties)
        if change.action == "added" and name and (change.type, name) in had:
            old = had[change.type, name]
            yield change.objection(
                what=f"the name {name} still belongs to {old.path} when it is created",
                instead="keep the logical id, or change the name",
            )


def _exports_in_use(base: Side, head: Side, changes: Sequence[Change]) -> Iterator[Objection]:
    """Find exports that a deployed stack imports: they cannot be removed or changed."""
    imported = {
        name: user for user, stack in base.stacks.items() for name in _imports(stack.template)
    }
    replaced = {(each.stack, each.logical_id) for each in changes if each.action == "replaced"}
    for stack_name, stack in head.stacks.items():
        before = base.stacks.get(stack_name)
        exports = _exports(stack.template)
        for name in _exports(before.template) if before else ():
            if name not in imported:
                continue
            user = imported[name]
            if name not in exports:
                yield Objection(
                    stack=stack_name,
                    path=name,
                    what=f"the export is removed while {user} imports it",
                    instead=f"keep it with export_value until {user} is deployed without it",
                )
            elif any((stack_name, each) in replaced for each, _ in references(exports[name])):
                yield Objection(
                    stack=stack_name,
                    path=name,
                    what=f"the export's value changes while {user} imports it",
                    instead="create a new resource under another id and move to it in two deploys",
                )


def _exports(template: Any) -> dict[str, Any]:
    outputs = (template.get("Outputs") or {}).values()
    return {spell(each["Export"]["Name"]): each["Value"] for each in outputs if "Export" in each}


def _imports(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _imports(item)
    elif isinstance(node, dict):
        if "Fn::ImportValue" in node:
            yield spell(node["Fn::ImportValue"])
        for item in node.values():
            yield from _imports(item)
