"""Conditions of a policy statement: AWS's operators, over the keys of a request.

A key that the embedded AWS cannot fill in, or an operator that it lacks, raises UnknownCondition:
otherwise a missing value would be taken for one that AWS does not send.
"""

import contextlib
import fnmatch
import functools
import glob
import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A request's condition keys, by lower-case name; a key with several values has a tuple.
Keys = Mapping[str, str | tuple[str, ...]]
Compare = Callable[[str, str, Keys], bool]
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
_KNOWN = {f"{where}:{name}" for where, names in WORDS["condition_keys"].items() for name in names}
_VARIABLE = re.compile(r"\$\{([^}]*)\}")


class UnknownCondition(Exception):
    """A condition that the embedded AWS cannot evaluate; the text is its key or operator."""


class Unresolved(Exception):
    """A policy variable without a value in this request."""


def matches(value: str, pattern: str, keys: Keys) -> bool:
    """Whether a value matches a pattern of * and ?; its policy variables' values are literal."""
    text = pattern.replace("[", "[[]")
    if "${" in text:
        text = _VARIABLE.sub(lambda found: glob.escape(_value_of(found[1], keys)), text)
    return _compiled(text).match(value) is not None


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(text))


def _value_of(variable: str, keys: Keys) -> str:
    if variable in ("*", "?", "$"):
        return variable
    name, _, default = (part.strip() for part in variable.partition(","))
    check_known(name)
    value = keys.get(name.lower()) or default.strip("'")
    if not value or not isinstance(value, str):
        raise Unresolved(name)
    return value


@functools.cache
def check_known(key: str) -> None:
    """Raise UnknownCondition unless requests here can have the key."""
    family = re.match(r"[a-z0-9]+:(?:[a-z]+/|x-amz-)", key.lower())
    if not {key.lower(), family and family.group()} & _KNOWN:
        raise UnknownCondition(f"condition key {key}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One key of one operator, with the values that it is compared with."""

    operator: str
    key: str
    values: tuple[str, ...]

    def holds(self, keys: Keys) -> bool:
        """Whether it holds for a request with these keys."""
        check_known(self.key)
        found = keys.get(self.key.lower())
        actual = () if found is None else (found,) if isinstance(found, str) else found
        compare, is_negated, qualifier, if_exists = _operator(self.operator)
        if compare is None:
            return str(not actual).lower() in [value.lower() for value in self.values]
        if if_exists and found is None:
            return True
        equal = [any(compare(each, value, keys) for value in self.values) for each in actual]
        if qualifier:
            return (all if qualifier == "ForAllValues" else any)(e != is_negated for e in equal)
        return any(equal) != is_negated


def as_list(value: Any) -> list[Any]:
    """Return a list, also for a single item: JSON policies have either."""
    return value if isinstance(value, list) else [value]


@functools.cache
def _operator(name: str) -> tuple[Compare | None, bool, str, bool]:
    """Return an operator's comparison (None: Null), whether it is negated, qualifier, IfExists."""
    qualifier, _, word = name.rpartition(":")
    whole = word.removesuffix("IfExists")
    plain = whole.replace("Not", "", 1)
    if name == "Null":
        return None, False, "", False
    if plain not in _COMPARISONS or qualifier not in ("", "ForAllValues", "ForAnyValue"):
        raise UnknownCondition(f"condition operator {name}")
    return _COMPARISONS[plain], plain != whole, qualifier, whole != word


def _equals(actual: str, wanted: str, keys: Keys) -> bool:
    return actual == _VARIABLE.sub(lambda found: _value_of(found[1], keys), wanted)


def _arn_like(actual: str, pattern: str, keys: Keys) -> bool:
    # An ARN is split at its first five colons, not counting those in variables.
    parts, wanted = actual.split(":", 5), re.split(r":(?![^{]*\})", pattern, maxsplit=5)
    return len(parts) == len(wanted) == 6 and all(
        matches(part, each, keys) for part, each in zip(parts, wanted, strict=True)
    )


def _numeric(holds: Callable[[float, float], bool]) -> Compare:
    def compare(actual: str, wanted: str, keys: Keys) -> bool:
        with contextlib.suppress(ValueError):  # not a number
            return holds(float(actual), float(wanted))
        return False

    return compare


_COMPARISONS: Mapping[str, Compare] = {
    "StringEquals": _equals,
    "StringEqualsIgnoreCase": lambda a, b, keys: _equals(a.lower(), b.lower(), keys),
    "StringLike": matches,
    "ArnEquals": _arn_like,
    "ArnLike": _arn_like,
    "Bool": lambda a, b, keys: a.lower() == b.lower(),
    "NumericEquals": _numeric(operator.eq),
    "NumericLessThan": _numeric(operator.lt),
    "NumericLessThanEquals": _numeric(operator.le),
    "NumericGreaterThan": _numeric(operator.gt),
    "NumericGreaterThanEquals": _numeric(operator.ge),
}
