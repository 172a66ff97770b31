"""What a service's model, as botocore has it, does not allow in a request: sizes, names, patterns.

botocore itself leaves these limits to the service. Each caller says them in its own words.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

# Java's classes of characters, in Python's words; a pattern with another one is left out.
_CLASSES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": " \xa0\u2000-\u200a\u3000"}


def violations(shape: Any, value: Any, where: str = "") -> Iterator[tuple[str, str, Any, Any]]:
    """Yield place, rule, limit and value of all that a shape does not allow.

    The rules are missing (a required member), max, min, enum and pattern.
    """
    limits, parts = shape.metadata, list[tuple[str, Any, Any]]()
    if shape.type_name == "structure":
        at = {name: f"{where}.{name}".removeprefix(".") for name in shape.members}
        for name in sorted(set(shape.required_members) - set(value)):
            yield at[name], "missing", None, None
        given = [name for name, item in value.items() if name in at and item is not None]
        parts = [(at[name], shape.members[name], value[name]) for name in given]
    elif shape.type_name == "list":
        parts = [(f"{where}[{number}]", shape.member, item) for number, item in enumerate(value)]
    elif shape.type_name == "map":
        parts = [(f"{where}.{key}", shape.value, item) for key, item in value.items()]
        parts += [(f"{where}: the name {key[:40]!r}", shape.key, key) for key in value]
    for place, member, item in parts:
        yield from violations(member, item, place)
    size = len(value) if isinstance(value, str | list | dict) else value
    if isinstance(size, int | float):
        if size > limits.get("max", size):
            yield where, "max", limits["max"], value
        if size < limits.get("min", size):
            yield where, "min", limits["min"], value
    if isinstance(value, str):
        pattern = _pattern(limits.get("pattern", ""))
        if limits.get("enum") and value not in limits["enum"]:
            yield where, "enum", limits["enum"], value
        elif pattern is not None and not pattern.fullmatch(value):
            yield where, "pattern", limits["pattern"], value


@functools.cache
def _pattern(text: str) -> re.Pattern[str] | None:
    for java, ours in _CLASSES.items():
        text = text.replace(java, ours)
    try:
        return re.compile(text) if text else None
    except re.error:
        return None
