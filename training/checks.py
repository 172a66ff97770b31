"""Refusals of a config's values, one sentence each, for its `__post_init__`."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_NONE: Mapping[float, Sequence[str]] = MappingProxyType({})


def check_fields(
    config: Any,
    *,
    at_least: Mapping[float, Sequence[str]] = _NONE,
    above_0: Sequence[str] = (),
    shares: Sequence[str] = (),
) -> None:
    """Refuse a value that a field cannot have; a Literal type says what its field takes.

    `at_least`: the least value -> the fields that it holds for.
    """
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal:
            check_choice(name, getattr(config, name), get_args(kind))
    for least, names in at_least.items():
        for name in names:
            if (value := getattr(config, name)) < least:
                raise ValueError(f"{name} is {value}; give at least {least}")
    for name in above_0:
        if (value := getattr(config, name)) <= 0:
            raise ValueError(f"{name} is {value}; give more than 0")
    for name in shares:
        if not 0.0 <= (value := getattr(config, name)) <= 1.0:
            raise ValueError(f"{name} is {value}; give a share from 0 to 1")


def check_choice(name: str, value: Any, known: Iterable[str], other: str = "") -> None:
    """Refuse a value that is not one of the known ones; `other` says what else is accepted."""
    if value not in (known := tuple(known)):
        raise ValueError(f"{name} is {value!r}; give {other}one of {', '.join(known)}")
