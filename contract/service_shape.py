"""What a service's model, as botocore has it, does not allow in a request: sizes, names, patterns.

botocore itself leaves these limits to the service. Each caller says them in its own words.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

# A member's name, a list's index, a map's key; None is the key of a map itself.
Step = str | int | tuple[str] | None
# Java's classes of characters, in Python's words; a pattern with another one is left out.
_CLASSES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": " \xa0\u2000-\u200a\u3000"}


def violations(
    shape: Any, value: Any, where: tuple[Step, ...] = ()
) -> Iterator[tuple[tuple[Step, ...], str, Any, Any]]:
    """Yield place, rule, limit and value of all that a shape does not allow.

    The rules are missing (a required member), max, min, enum and pattern.
    """
    limits = shape.metadata
    if shape.type_name == "structure":
        for name in sorted(set(shape.required_members) - set(value)):
            yield (*where, name), "missing", None, None
    for step, member, item in _parts(shape, value):
        yield from violations(member, item, (*where, step))
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


def _parts(shape: Any, value: Any) -> Iterator[tuple[Step, Any, Any]]:
    if shape.type_name == "structure":
        for name, item in value.items():
            if name in shape.members and item is not None:
                yield name, shape.members[name], item
    elif shape.type_name == "list":
        for number, item in enumerate(value):
            yield number, shape.member, item
    elif shape.type_name == "map":
        for key, item in value.items():
            yield None, shape.key, key
            yield (key,), shape.value, item


@functools.cache
def _pattern(text: str) -> re.Pattern[str] | None:
    for java, ours in _CLASSES.items():
        text = text.replace(java, ours)
    try:
        return re.compile(text) if text else None
    except re.error:
        return None
