"""Reads a template (JSON or YAML), checks its structure, and orders its resources.

Refuses, in CloudFormation's words, errors that do not depend on resource properties.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import yaml  # type: ignore[import-untyped]

from embedded_aws.cloudformation.errors import CloudFormationError, format_error
from embedded_aws.cloudformation.intrinsics import Expressions
from embedded_aws.limits import Limits

_LIMITS = Limits()
SECTIONS = {
    "AWSTemplateFormatVersion", "Description", "Metadata", "Parameters", "Mappings",
    "Conditions", "Rules", "Resources", "Outputs", "Transform", "Hooks",
}  # fmt: skip
RESOURCE_KEYS = {
    "Type", "Properties", "DependsOn", "Condition", "Metadata", "DeletionPolicy",
    "UpdateReplacePolicy", "UpdatePolicy", "CreationPolicy",
}  # fmt: skip
PSEUDO = {
    "AWS::AccountId", "AWS::NotificationARNs", "AWS::NoValue", "AWS::Partition", "AWS::Region",
    "AWS::StackId", "AWS::StackName", "AWS::URLSuffix",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A parsed template and its text (GetTemplate returns the text)."""

    body: str
    content: Mapping[str, Any]

    def section(self, name: str) -> Mapping[str, Any]:
        return self.content.get(name) or {}

    @property
    def resources(self) -> Mapping[str, Any]:
        return self.section("Resources")

    def wanted(self, expressions: Expressions) -> list[str]:
        """List the logical ids whose condition is true, each after its dependencies."""
        wanted = {
            name
            for name, resource in self.resources.items()
            if "Condition" not in resource or expressions.condition(resource["Condition"])
        }
        graph = {
            name: sorted(dependencies(self.resources[name]) & wanted)
            for name in self.resources
            if name in wanted
        }
        return list(TopologicalSorter(graph).static_order())


def load_template(body: str) -> Any:
    """Return what a template's text says, JSON or YAML."""
    return json.loads(body) if body.lstrip().startswith("{") else yaml.load(body, _Loader)


def parse_template(body: str) -> Template:
    """Parse a template and check its structure."""
    try:
        content = load_template(body)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise format_error(f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise format_error("unsupported structure.")
    unknown = sorted(set(content) - SECTIONS)
    if unknown:
        raise CloudFormationError(f"Invalid template property or properties [{', '.join(unknown)}]")
    if content.get("Transform"):
        raise CloudFormationError(
            "The embedded AWS does not run Transforms; deploy a template without one"
        )
    if not content.get("Resources"):
        raise format_error("At least one Resources member must be defined.")
    if beyond := _LIMITS.beyond("cloudformation:template", {**content, "text": body}):
        raise CloudFormationError(beyond[1], beyond[0])
    template = Template(body=body, content=content)
    for name, resource in template.resources.items():
        _check_resource(name, resource)
    _check_references(template)
    return template


def references(node: Any) -> Iterator[tuple[str, str]]:
    """Yield every (name, attribute) that a node refers to; a Ref's attribute is empty."""
    if isinstance(node, list):
        for item in node:
            yield from references(item)
    if not isinstance(node, dict):
        return
    if len(node) == 1:
        function, argument = next(iter(node.items()))
        if function == "Ref" and isinstance(argument, str):
            yield argument, ""
        elif function == "Fn::GetAtt":
            parts = argument.split(".", 1) if isinstance(argument, str) else argument
            yield parts[0], parts[1] if isinstance(parts[1], str) else ""
        elif function == "Fn::Sub":
            yield from _sub_references(argument)
    for item in node.values():
        yield from references(item)


def _sub_references(argument: Any) -> Iterator[tuple[str, str]]:
    text, own = argument if isinstance(argument, list) else (argument, {})
    for name in re.findall(r"\$\{([^!][^}]*)\}", text):
        head, _, attribute = name.strip().partition(".")
        if name.strip() not in own:
            yield head, attribute


def dependencies(resource: Mapping[str, Any]) -> set[str]:
    """Return the names that a resource depends on: its references and its DependsOn."""
    depends_on = resource.get("DependsOn", [])
    explicit = [depends_on] if isinstance(depends_on, str) else depends_on
    return {*explicit, *(name for name, _ in references(resource.get("Properties", {})))}


def _check_resource(name: str, resource: Any) -> None:
    if not re.fullmatch(r"[A-Za-z0-9]+", name):
        raise format_error(f"Resource name {name} is non alphanumeric.")
    if not isinstance(resource, dict) or not isinstance(resource.get("Type"), str):
        raise format_error(
            f"[/Resources/{name}] Every Resources object must contain a Type member."
        )
    unknown = sorted(set(resource) - RESOURCE_KEYS)
    if unknown:
        raise CloudFormationError(f"Invalid template resource property '{unknown[0]}'")


def unresolved(names: Sequence[str], block: str) -> CloudFormationError:
    """Return the refusal of references to resources that the template, or a condition, lacks."""
    listed = ", ".join(names)
    return format_error(
        f"Unresolved resource dependencies [{listed}] in the {block} block of the template"
    )


def _check_references(template: Template) -> None:
    known = {*template.section("Parameters"), *PSEUDO}
    if wrong := {name for name, _ in references(template.section("Conditions"))} - known:
        raise format_error(
            f"Unresolved dependencies [{', '.join(sorted(wrong))}]. Cannot reference resources in "
            "the Conditions block of the template"
        )
    known |= {*template.resources}
    needs = {name: dependencies(resource) for name, resource in template.resources.items()}
    for section in ("Resources", "Outputs"):
        named = {name for name, _ in references(template.section(section))}
        if section == "Resources":
            named = named.union(*needs.values())
        if missing := sorted(named - known):
            raise unresolved(missing, section)
    graph = {name: each & set(template.resources) for name, each in needs.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        names = sorted(set(error.args[1]))
        raise CloudFormationError(
            f"Circular dependency between resources: [{', '.join(names)}]"
        ) from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader for YAML with CloudFormation's short tags; dates stay text, as in policies."""


def _short_tag(loader: Any, suffix: str, node: Any) -> Any:
    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    name = suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}"
    return {name: value}


_Loader.add_multi_constructor("!", _short_tag)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
