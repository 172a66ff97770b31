"""Tables of a TOML file become dataclasses: an unknown or missing name is refused by its name."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, cast, get_args

Made = TypeVar("Made")
# The kinds of value that TOML has too; a number without a point may stand for one with.
_TAKES: Mapping[object, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
}


def texts(given: Mapping[str, object]) -> dict[str, str]:
    """Return a table whose values are all texts, as variables are."""
    return {name: str(value) for name, value in given.items()}


def listed(name: str, value: object) -> tuple[Any, ...]:
    """Return a list as a tuple; a text, which is a sequence too, is refused."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r}; give a list")
    return tuple(value)


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; give one of: {', '.join(known)}")


def build(kind: type[Made], values: Mapping[str, Any], where: str) -> Made:
    """Build a dataclass; an unknown or missing field is a ValueError that names it."""
    known = {each.name: each.type for each in fields(cast(Any, kind))}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(known)}")
        _check_type(f"{name} of {where}", value, known[name])
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition('() ')[2]}") from None


def _check_type(name: str, value: object, kind: object) -> None:
    """Refuse a text where a number is meant, and the like; what has parts checks them itself."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    taken = [each for known in kinds for each in _TAKES.get(known, ())]
    if taken and type(value) not in taken:
        names = " or ".join(each.__name__ for each in taken)
        raise ValueError(f"{name} is {value!r}; give: {names}")
