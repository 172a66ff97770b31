"""Evaluates a template's expressions: Ref, Fn::*, conditions. Calls no API."""

import base64
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embedded_aws.cloudformation.errors import format_error, template_error

NO_VALUE = object()
_PLACEHOLDER = re.compile(r"\$\{([^!][^}]*)\}")
_DYNAMIC = re.compile(r"\{\{resolve:(.*?)\}\}")


class Unknown(str):
    """A value that is not known until another resource is created or updated."""

    __slots__ = ()


def has_unknown(value: Any) -> bool:
    """Whether a value is unknown or contains an unknown value at any depth."""
    if isinstance(value, dict):
        return any(has_unknown(item) for item in value.values())
    if isinstance(value, list):
        return any(has_unknown(item) for item in value)
    return isinstance(value, Unknown)


class Expressions:
    """Evaluates nodes with parameters (pseudo parameters too), mappings, conditions and lookups."""

    def __init__(
        self,
        *,
        parameters: Mapping[str, Any],
        mappings: Mapping[str, Any] | None = None,
        conditions: Mapping[str, Any] | None = None,
        reference: Callable[[str], str] | None = None,
        attribute: Callable[[str, str], Any] | None = None,
        imported: Callable[[str], str] | None = None,
        zones: Callable[[], Sequence[str]] | None = None,
        dynamic: Callable[[str], str] | None = None,
    ) -> None:
        self.parameters = parameters
        self.mappings = mappings or {}
        self.conditions = conditions or {}
        self.reference = reference or _unresolved
        self.attribute = attribute or (lambda name, _: _unresolved(name))
        self.imported = imported or _unresolved
        self.zones = zones or list
        self.dynamic = dynamic or _unresolved
        self._known_conditions: dict[str, bool] = {}

    def value(self, node: Any) -> Any:
        """Evaluate a node; a child that evaluates to AWS::NoValue is removed from its parent."""
        if isinstance(node, dict):
            if len(node) == 1:
                name, argument = next(iter(node.items()))
                if name in FUNCTIONS:
                    return FUNCTIONS[name](self, argument)
                if name.startswith("Fn::"):
                    raise template_error(f"unsupported intrinsic function {name}")
            items = {key: self.value(item) for key, item in node.items()}
            return {key: item for key, item in items.items() if item is not NO_VALUE}
        if isinstance(node, list):
            return [item for item in map(self.value, node) if item is not NO_VALUE]
        if isinstance(node, str) and "{{resolve:" in node:
            return _DYNAMIC.sub(lambda match: self.dynamic(match.group(1)), node)
        return node

    def condition(self, name: str) -> bool:
        """Evaluate a named condition, once."""
        if name not in self.conditions:
            raise format_error(f"Unresolved condition dependency {name}")
        if name not in self._known_conditions:
            self._known_conditions[name] = truth(self.value(self.conditions[name]))
        return self._known_conditions[name]


def truth(value: Any) -> bool:
    return str(value).lower() == "true"


def scalar(value: Any) -> str:
    """Return a scalar as CloudFormation writes it into a string."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _unresolved(name: str) -> str:
    raise template_error(f"unresolved reference to {name}")


def _ref(expressions: Expressions, name: str) -> Any:
    if name == "AWS::NoValue":
        return NO_VALUE
    if name in expressions.parameters:
        return expressions.parameters[name]
    return expressions.reference(name)


def _get_att(expressions: Expressions, argument: Any) -> Any:
    name, attribute = argument.split(".", 1) if isinstance(argument, str) else argument
    return expressions.attribute(name, expressions.value(attribute))


def _join(expressions: Expressions, argument: Any) -> Any:
    delimiter, parts = argument
    values = expressions.value(parts)
    if isinstance(values, Unknown):
        return values
    if not isinstance(values, list):
        raise template_error("every Fn::Join object requires a list of strings")
    text = delimiter.join(scalar(item) for item in values)
    return Unknown(text) if has_unknown(values) else expressions.value(text)


def _sub(expressions: Expressions, argument: Any) -> Any:
    text, own = argument if isinstance(argument, list) else (argument, {})
    variables = expressions.value(own)
    later = False

    def replace(match: re.Match[str]) -> str:
        nonlocal later
        name = match.group(1).strip()
        if name in variables:
            value = variables[name]
        elif "." in name and name not in expressions.parameters:
            value = _get_att(expressions, name)
        else:
            value = _ref(expressions, name)
        later = later or has_unknown(value)
        return scalar(value)

    done = _PLACEHOLDER.sub(replace, text).replace("${!", "${")
    return Unknown(done) if later else expressions.value(done)


def _select(expressions: Expressions, argument: Any) -> Any:
    index, items = expressions.value(argument[0]), expressions.value(argument[1])
    if isinstance(items, Unknown):
        return items
    try:
        return items[int(index)]
    except (IndexError, ValueError) as error:
        raise template_error(
            f"Fn::Select cannot select nonexistent value at index {index}"
        ) from error


def _split(expressions: Expressions, argument: Any) -> Any:
    text = expressions.value(argument[1])
    return text if isinstance(text, Unknown) else scalar(text).split(argument[0])


def _if(expressions: Expressions, argument: Any) -> Any:
    name, then, otherwise = argument
    return expressions.value(then if expressions.condition(name) else otherwise)


def _find_in_map(expressions: Expressions, argument: Any) -> Any:
    name, top, second = (expressions.value(item) for item in argument[:3])
    try:
        return expressions.value(expressions.mappings[name][scalar(top)][scalar(second)])
    except KeyError as error:
        if len(argument) > 3 and "DefaultValue" in argument[3]:
            return expressions.value(argument[3]["DefaultValue"])
        raise template_error(f"Unable to get mapping for {name}::{top}::{second}") from error


def _import_value(expressions: Expressions, argument: Any) -> Any:
    name = expressions.value(argument)
    return name if isinstance(name, Unknown) else expressions.imported(name)


def _base64(expressions: Expressions, argument: Any) -> str:
    text = expressions.value(argument)
    encoded = base64.b64encode(scalar(text).encode()).decode()
    return Unknown(encoded) if isinstance(text, Unknown) else encoded


def _cidr(expressions: Expressions, argument: Any) -> Any:
    block, count, *bits = expressions.value(argument)
    if isinstance(block, Unknown):
        return block
    network = ipaddress.ip_network(block)
    prefix = network.max_prefixlen - int(bits[0] if bits else 8)
    return [
        str(subnet)
        for subnet, _ in zip(network.subnets(new_prefix=prefix), range(int(count)), strict=False)
    ]


def _equals(expressions: Expressions, argument: Any) -> bool:
    left, right = expressions.value(argument)
    if isinstance(left, list) or isinstance(right, list):
        return bool(left == right)
    return scalar(left) == scalar(right)


def _contains(expressions: Expressions, argument: Any) -> bool:
    items, wanted = expressions.value(argument)
    return scalar(wanted) in [scalar(item) for item in items]


def _condition(expressions: Expressions, argument: Any) -> Any:
    # A policy statement's Condition is a block, not a name.
    if isinstance(argument, str):
        return expressions.condition(argument)
    return {"Condition": expressions.value(argument)}


FUNCTIONS: dict[str, Callable[[Expressions, Any], Any]] = {
    "Ref": _ref,
    "Condition": _condition,
    "Fn::GetAtt": _get_att,
    "Fn::Join": _join,
    "Fn::Sub": _sub,
    "Fn::Select": _select,
    "Fn::Split": _split,
    "Fn::If": _if,
    "Fn::FindInMap": _find_in_map,
    "Fn::ImportValue": _import_value,
    "Fn::Base64": _base64,
    "Fn::Cidr": _cidr,
    "Fn::GetAZs": lambda expressions, _: list(expressions.zones()),
    "Fn::Equals": _equals,
    "Fn::Not": lambda expressions, argument: not truth(expressions.value(argument[0])),
    "Fn::And": lambda expressions, items: all(truth(expressions.value(item)) for item in items),
    "Fn::Or": lambda expressions, items: any(truth(expressions.value(item)) for item in items),
    "Fn::Contains": _contains,
}
