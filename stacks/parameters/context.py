"""CDK context as the stack parameters read it: cdk.json's defaults, known names, typed values."""

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

# A parameter of any number of names: -c env.NAME=VALUE, in cdk.json "env": {"NAME": "VALUE"}.
Named: TypeAlias = tuple[tuple[str, str], ...]
CDK_JSON = Path(__file__).parents[2] / "cdk.json"
# cdk.json's values of parameters that decisions.py and limits.py decide.
LEFT_OPEN = ("by-size", "by-workload", "by-manifest", "by-plan")
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}


def defaults() -> dict[str, object]:
    """Return cdk.json's context without CDK's own keys."""
    context = json.loads(CDK_JSON.read_text(encoding="utf-8"))["context"]
    return without_cdk_keys(context)


def without_cdk_keys(context: Mapping[str, object]) -> dict[str, object]:
    """Drop CDK's own keys: feature flags start with @, lookups and CLI switches contain a colon."""
    return {
        name: value
        for name, value in context.items()
        if not name.startswith("@") and ":" not in name
    }


def with_named(given: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """Gather each -c NAME.KEY=VALUE of these names into NAME's own values, which it overrides."""
    gathered = dict(given)
    for dotted, value in given.items():
        name, dot, key = dotted.partition(".")
        if dot and name in names:
            own = gathered.get(name)
            gathered[name] = {**(own if isinstance(own, Mapping) else {}), key: value}
            del gathered[dotted]
    return gathered


def refuse_unknown_names(given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse a name that is not a parameter, and suggest the nearest."""
    for name in given:
        if name not in known:
            first, dot, key = name.partition(".")
            near = difflib.get_close_matches(first, known, n=1)
            hint = f"did you mean {near[0]}{dot}{key}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"context {name!r} is unknown; {hint}")


def parse(kind: object, name: str, value: object) -> object:
    """Turn a context value into a parameter of the type that its field declares."""
    return _PARSERS[kind](name, value)


def parse_int(name: str, value: object) -> int:
    """Read a whole number; values from `-c` are strings."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value.strip()):
        return int(value)
    raise ValueError(f"{name} is {value!r}; give a whole number")


def parse_text(name: str, value: object) -> str:
    """Read a string without surrounding white space."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; give a string")
    return value.strip()


def _parse_float(name: str, value: object) -> float:
    try:
        number = float(str(value) or 0)
    except ValueError:
        number = float("nan")
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{name} is {value!r}; give a number")
    return number


def _parse_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUTHS:
        return _TRUTHS[value.strip().lower()]
    raise ValueError(f"{name} is {value!r}; give true or false")


def _parse_texts(name: str, value: object) -> tuple[str, ...]:
    # Overrides may contain commas (a=1,2), zones never do.
    separator = r"\s+" if name == "overrides" else r"[,\s]+"
    if isinstance(value, str):
        return tuple(re.split(separator, value.strip())) if value.strip() else ()
    if isinstance(value, list | tuple):
        return tuple(parse_text(name, item) for item in value)
    raise ValueError(f"{name} is {value!r}; give values separated by spaces")


def _parse_named(name: str, value: object) -> Named:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; give each as -c {name}.NAME=VALUE")
    # What cdk.json has as a number is a text to the program.
    return tuple(
        (key, text if isinstance(text, str) else json.dumps(text)) for key, text in value.items()
    )


_PARSERS: Mapping[object, Callable[[str, object], object]] = {
    str: parse_text,
    int: parse_int,
    float: _parse_float,
    bool: _parse_bool,
    tuple[str, ...]: _parse_texts,
    Named: _parse_named,
}
