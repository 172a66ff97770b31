"""Measures calls by the rows of contract/aws_limits.toml, and refuses them in AWS's words."""

import base64
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jmespath
from botocore.exceptions import BotoCoreError, ClientError
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions, signature

from contract.aws_limits import AwsLimit, aws_limits

Mistake = tuple[str, str, int]  # an error's code, message and status
Client = Callable[[str], Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Limits:
    """The rows, and what they measure in an account, whose state `client` reads."""

    def __init__(self, client: Client | None = None) -> None:
        self._options = jmespath.Options(custom_functions=_Measures(client))

    def beyond(self, call: str, given: Mapping[str, Any]) -> Mistake | None:
        """Return how AWS refuses these parameters of a call because of a row, or None."""
        for row in (aws_limits()[name] for name in _rows_of(call) if name in aws_limits()):
            try:
                found = _compiled(row.value).search(given, self._options)
            except JMESPathError:  # a value of another type, which the service refuses
                continue
            for value in found if isinstance(found, list) else [found]:
                if not _allows(row, value):
                    bounds = {"value": value, "most": row.most, "least": row.least}
                    return row.code, row.message.format(**{**given, **bounds}), row.status
        return None


def _allows(row: AwsLimit, value: Any) -> bool:
    """Whether a row allows a value; what is not there is no number and no text."""
    if row.pattern:
        return not isinstance(value, str) or bool(re.fullmatch(row.pattern, value, re.DOTALL))
    if row.among:
        return value is None or value in row.among
    if not row.is_number:
        return not value
    return isinstance(value, bool) or not isinstance(value, int | float) or row.takes(value)


@functools.cache
def _rows_of(call: str) -> list[str]:
    rows = aws_limits().values()
    return [row.name for row in rows if any(fnmatchcase(call, each) for each in row.calls)]


@functools.cache
def _compiled(expression: str) -> Any:
    return jmespath.compile(expression)


def _takes(*kinds: str) -> Callable[[_Function], _Function]:
    """Make a method a function of JMESPath, whose arguments have these types."""
    types = [{"types": [] if kind == "any" else kind.split("|")} for kind in kinds]
    made: Callable[[_Function], _Function] = signature(*types)
    return made


class _Measures(Functions):  # type: ignore[misc]
    """What rows measure in a request, beside JMESPath's own functions; null has no size."""

    def __init__(self, client: Client | None) -> None:
        self._client = client

    @_takes("any")
    def _func_bytes(self, value: Any) -> int:
        return len(value.encode() if isinstance(value, str) else value or b"")

    @_takes("string|null")
    def _func_decoded(self, text: str | None) -> int:
        """Return the number of bytes before base64."""
        return len(base64.b64decode(text or ""))

    @_takes("string|null")
    def _func_dense(self, text: str | None) -> int:
        """Return the number of characters without white space, which IAM does not count."""
        return len("".join((text or "").split()))

    @_takes("string|null")
    def _func_parsed(self, text: str | None) -> Any:
        try:
            return json.loads(text or "")
        except ValueError:
            return None

    @_takes("string|null", "string|null")
    def _func_fits(self, text: str | None, pattern: str | None) -> bool:
        return re.search(pattern or "", text or "") is not None

    @_takes("number|null", "number|null")
    def _func_ratio(self, part: float | None, whole: float | None) -> float | None:
        return part / whole if part and whole else None

    @_takes("number|null", "number|null")
    def _func_product(self, one: float | None, other: float | None) -> float | None:
        return one * other if one and other else None

    @_takes("number", "number")
    def _func_remainder(self, number: int, of: int) -> int:
        return number % of

    @_takes("any")
    def _func_age(self, time: datetime) -> float:
        """Return a time's seconds before now."""
        return (datetime.now(UTC) - time.replace(tzinfo=UTC)).total_seconds()

    @_takes("array|null", "array|null")
    def _func_without(self, items: list[Any] | None, others: list[Any] | None) -> list[Any]:
        """Return the items once each, without null and the others."""
        return list(
            dict.fromkeys(i for i in items or [] if i is not None and i not in (others or ()))
        )

    @_takes("array|null")
    def _func_repeated(self, items: list[Any] | None) -> int:
        """Return how many items are repetitions."""
        return len(items or []) - len(set(items or []))

    @_takes("array|null")
    def _func_descents(self, items: list[Any] | None) -> int:
        """Return how many items are below the one before."""
        return sum(after < before for before, after in itertools.pairwise(items or []))

    @_takes("array|null")
    def _func_span(self, items: list[Any] | None) -> float:
        return max(items) - min(items) if items else 0

    @_takes("string", "string", "object")
    def _func_asked(self, service: str, operation: str, arguments: dict[str, Any]) -> Any:
        """Return the answer of one of the account's services, None if it has none."""
        given = {name: value for name, value in arguments.items() if value is not None}
        try:
            return getattr(self._client(service), operation)(**given) if self._client else None
        except (ClientError, BotoCoreError):
            return None

    @_takes("string", "string", "string")
    def _func_inline_characters(self, role: str, name: str, document: str) -> int:
        """Return the characters of a role's inline policies with this one."""
        listed = self._func_asked("iam", "list_role_policies", {"RoleName": role}) or {}
        others = [
            self._func_asked("iam", "get_role_policy", {"RoleName": role, "PolicyName": other})
            for other in listed.get("PolicyNames", [])
            if other != name
        ]
        texts = [json.dumps(each["PolicyDocument"]) for each in others if each]
        return sum(map(self._func_dense, [document, *texts]))
