"""cfn-lint's resource schemas: types, attributes, validity, and which changes replace a resource.

Only this file uses cfn-lint.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cfnlint.jsonschema import StandardValidator
from cfnlint.schema import PROVIDER_SCHEMA_MANAGER
from cfnlint.schema._exceptions import ResourceNotFoundError

from embedded_aws.cloudformation.intrinsics import Unknown, has_unknown, scalar

REGION = "us-east-1"
# According to AWS's pages and the CDK CLI's resource database, changing one of these properties
# replaces the resource; according to cfn-lint's schemas, it is updated in place.
DISPUTED: Mapping[str, Sequence[tuple[str, ...]]] = {
    "AWS::EC2::SpotFleet": [
        ("SpotFleetRequestConfigData", "LaunchTemplateConfigs"),
        ("SpotFleetRequestConfigData", "OnDemandTargetCapacity"),
    ]
}
# The types for which this process trusts the schema; for others it assumes a replacement.
IN_PLACE: set[str] = set()
# Checks whose result does not depend on values that are still unknown.
_SHAPE_KEYWORDS = {"additionalProperties", "required", "dependentRequired", "dependentExcluded"}
_SCALARS = {"string", "integer", "number", "boolean"}
_JAVA_TYPES = {"object": "JSONObject", "array": "JSONArray"}


@functools.cache
def schema_of(resource_type: str) -> Mapping[str, Any] | None:
    """Return the schema of a resource type, None if AWS has no such type."""
    try:
        schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema(REGION, resource_type)
    except ResourceNotFoundError:
        return None
    return dict(schema.schema)


@functools.cache
def attributes_of(resource_type: str) -> frozenset[str]:
    """Return the attributes that Fn::GetAtt may name."""
    schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema(REGION, resource_type)
    return frozenset(schema.get_atts)


def tag_property(resource_type: str) -> str | None:
    """Return the property that holds a resource's tags, None if it cannot take stack tags."""
    schema = schema_of(resource_type) or {}
    tagging = schema.get("tagging") or {}
    if not tagging.get("taggable"):
        return None
    return str(tagging.get("tagProperty", "/properties/Tags")).removeprefix("/properties/")


def tags_are_list(resource_type: str) -> bool:
    schema = schema_of(resource_type) or {}
    name = tag_property(resource_type) or "Tags"
    node = _resolve(schema, schema.get("properties", {}).get(name, {}))
    return "array" in _types(node)


def coerce(resource_type: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Convert scalars to the types of the schema, as CloudFormation does."""
    schema = schema_of(resource_type) or {}
    coerced = _coerce(schema, schema, dict(properties))
    return dict(coerced)


def problems(resource_type: str, properties: Mapping[str, Any]) -> list[str]:
    """List what is wrong with evaluated properties, in the words of CloudFormation's validator."""
    schema = schema_of(resource_type)
    if schema is None:
        return []
    found = []
    for error in StandardValidator(schema).iter_errors(properties):
        if has_unknown(error.instance) and (
            isinstance(error.instance, Unknown) or error.validator not in _SHAPE_KEYWORDS
        ):
            continue
        found.append(_in_words(error))
    return found


def replacing_paths(
    resource_type: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """List the paths of properties that differ and can only be set at creation."""
    return [path for path in create_only(resource_type) if at(old, path) != at(new, path)]


def changed_properties(
    resource_type: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """List the top-level properties that differ, each with its RequiresRecreation."""
    answer = []
    for name in sorted({*old, *new}):
        if old.get(name) == new.get(name):
            continue
        differing = [path for path in replacing_paths(resource_type, old, new) if path[0] == name]
        if not differing:
            answer.append((name, "Never"))
        elif any(has_unknown(at(new, path)) for path in differing):
            answer.append((name, "Conditionally"))
        else:
            answer.append((name, "Always"))
    return answer


def custom_name(resource_type: str, properties: Mapping[str, Any]) -> str | None:
    """Return the physical name that the template sets, None if it is generated."""
    schema = schema_of(resource_type) or {}
    identifier = schema.get("primaryIdentifier", [])
    if len(identifier) != 1:
        return None
    value = properties.get(identifier[0].removeprefix("/properties/"))
    return value if isinstance(value, str) else None


def create_only(resource_type: str) -> list[tuple[str, ...]]:
    """List the paths of properties that can only be set at creation."""
    schema = schema_of(resource_type) or {}
    disputed = () if resource_type in IN_PLACE else DISPUTED.get(resource_type, ())
    return [
        *(
            tuple(path.removeprefix("/properties/").split("/"))
            for path in schema.get("createOnlyProperties", [])
        ),
        *disputed,
    ]


def is_disputed(resource_type: str, paths: Sequence[tuple[str, ...]]) -> bool:
    """Whether AWS's documents disagree on all of these changes, if they replace the resource."""
    return set(paths) <= set(DISPUTED.get(resource_type, ()))


def create_only_values(
    resource_type: str, properties: Mapping[str, Any]
) -> list[tuple[tuple[str, ...], Any]]:
    """List the paths of properties that can only be set at creation, each with its value."""
    return [(path, at(properties, path)) for path in create_only(resource_type)]


def at(value: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path of property names; a * maps over the items of a list."""
    for index, step in enumerate(path):
        if step == "*" and isinstance(value, list):
            return [at(item, path[index + 1 :]) for item in value]
        if not isinstance(value, Mapping):
            return value if isinstance(value, Unknown) else None
        value = value.get(step)
    return value


def _types(node: Mapping[str, Any]) -> list[str]:
    types = node.get("type", [])
    return [types] if isinstance(types, str) else list(types)


def _resolve(root: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in node:
        target: Any = root
        for step in node["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        node = target
    return node


def _coerce(root: Mapping[str, Any], node: Mapping[str, Any], value: Any) -> Any:
    node = _resolve(root, node)
    if isinstance(value, Unknown):
        return value
    if isinstance(value, dict):
        return {key: _coerce(root, _member(root, node, key), item) for key, item in value.items()}
    if isinstance(value, list):
        return [_coerce(root, node.get("items", {}), item) for item in value]
    types = _types(node)
    if not types or len(_SCALARS & set(types)) != 1:
        return value
    return _scalar(value, next(name for name in types if name in _SCALARS))


def _member(root: Mapping[str, Any], node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    for branch in _branches(root, node):
        if key in branch.get("properties", {}):
            return dict(branch["properties"][key])
        # The patterns use Java's syntax (\\p), which Python cannot read; each object has one.
        for member in branch.get("patternProperties", {}).values():
            return dict(member)
    return {}


def _branches(root: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield node
    for keyword in ("anyOf", "oneOf", "allOf"):
        for branch in node.get(keyword, []):
            yield _resolve(root, branch)


def _scalar(value: Any, wanted: str) -> Any:
    if wanted == "string" and isinstance(value, bool | int | float):
        return scalar(value)
    if wanted == "boolean" and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if wanted in ("integer", "number") and isinstance(value, str):
        try:
            return int(value) if wanted == "integer" else float(value)
        except ValueError:
            return value
    return value


def _in_words(error: Any) -> str:
    path = "#/" + "/".join(map(str, error.path)) if error.path else "#"
    if error.validator == "additionalProperties":
        # cfn-lint puts the unknown key itself at the end of the path.
        parent = "#/" + "/".join(map(str, list(error.path)[:-1])) if len(error.path) > 1 else "#"
        return f"{parent}: extraneous key [{error.path[-1]}] is not permitted"
    if error.validator == "required":
        name = error.message.split("'")[1]
        return f"{path}: required key [{name}] not found"
    if error.validator == "type":
        wanted = error.validator_value
        name = wanted if isinstance(wanted, str) else "/".join(wanted)
        return f"{path}: expected type: {_JAVA_TYPES.get(name, name.capitalize())}, found: " + (
            _found(error.instance)
        )
    if error.validator in ("enum", "enumCaseInsensitive"):
        return f"{path}: {error.instance} is not a valid enum value ({error.message})"
    return f"{path}: failed validation constraint for keyword [{error.validator}] ({error.message})"


def _found(value: Any) -> str:
    names = {dict: "JSONObject", list: "JSONArray", str: "String", bool: "Boolean"}
    return names.get(type(value), type(value).__name__.capitalize())
