"""Tables of a TOML file become dataclasses: an unknown or missing name is refused by its name."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

Made = TypeVar("Made")


def texts(given: Mapping[str, object]) -> dict[str, str]:
    """Return a table whose values are all texts, as variables are."""
    return {name: str(value) for name, value in given.items()}


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; give one of: {', '.join(known)}")


def build(kind: type[Made], values: Mapping[str, Any], where: str) -> Made:
    """Build a dataclass; an unknown or missing field is a ValueError that names it."""
    known = [each.name for each in fields(cast(Any, kind))]
    for name in values:
        if name not in known:
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(known)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition('() ')[2]}") from None
