"""A run's config: a recipe, with fields overridden by name."""

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from training.errors import UserError, name_known
from training.workload import Workload


def parse_overrides(pairs: Sequence[str]) -> dict[str, str]:
    """Read `name=value` pairs; each name may occur once."""
    overrides: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UserError(f"the override {pair!r} cannot be read; write name=value")
        if name in overrides:
            raise UserError(f"the override {name!r} is given twice; give it once")
        overrides[name] = value
    return overrides


def resolve_config(workload: Workload[Any], recipe: str, overrides: Mapping[str, str]) -> Any:
    """The recipe's config with overrides applied by field name."""
    if recipe not in workload.recipes:
        raise UserError(
            f"workload {workload.name!r} has no recipe {recipe!r}; "
            f"{name_known(recipe, sorted(workload.recipes))}"
        )
    config = workload.recipes[recipe]()
    return with_overrides(config, overrides, f"the config of workload {workload.name!r}")


def with_overrides(config: Any, overrides: Mapping[str, str], what: str) -> Any:
    """A dataclass with fields overridden by name; `what` it is, for messages."""
    kinds = typing.get_type_hints(type(config))
    known = [field.name for field in fields(config)]
    values = {}
    for name, text in overrides.items():
        if name not in known:
            raise UserError(f"{what} has no field {name!r}; {name_known(name, known)}")
        values[name] = _parse_value(name, text, kinds[name])
    try:
        return replace(config, **values)
    except ValueError as error:
        raise UserError(f"invalid overrides {dict(overrides)}: {error}") from error


def _parse_value(name: str, text: str, kind: Any) -> Any:
    options = typing.get_args(kind) if _is_union(kind) else (kind,)
    if type(None) in options and text.lower() == "none":
        return None
    for option in options:
        if typing.get_origin(option) is Literal:
            if text in typing.get_args(option):
                return text
        elif option is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif option in (int, float):
            try:
                value = option(text)
            except ValueError:
                continue
            if math.isfinite(value):
                return value
        elif option is str:
            return text
    readable = getattr(kind, "__name__", str(kind))
    raise UserError(f"the override {name}={text!r} is not a valid {readable}; give another value")


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)
