"""AWS's policy evaluation logic: whether policies allow a call, as a pure function.

Explicit denies come first, then the grants of a resource's policy, then identity policies within
the permissions boundary; all in one account. A condition on a key that the embedded AWS cannot fill
in, or with an operator that it lacks, cannot be evaluated: a Deny then denies, an Allow allows
nothing, and the ruling names the condition.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

import contextlib
import fnmatch
import functools
import glob
import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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


IDENTITY, BOUNDARY = "identity-based policy", "permissions boundary"
RESOURCE = "resource-based policy"
# How a Principal names a caller: by its own ARN, as everybody, by its role or by its account.
ITSELF, EVERYBODY, ROLE, ACCOUNT = 4, 3, 2, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """A caller: the root user, an IAM user, a role session, a service, a token, or anonymous.

    `kind` is AWS's aws:PrincipalType, Service or Federated; `role` is a session's role ARN.
    """

    arn: str
    kind: str
    account: str = ""
    role: str = ""
    keys: Keys = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiCall:
    """One action on one resource, with the keys of the request."""

    action: str
    resource: str
    keys: Keys = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Statement:
    """One statement; `policy` says where it is, `name` is its Sid or its number."""

    policy: str
    name: str
    document: Mapping[str, Any]
    conditions: tuple[Condition, ...]

    @property
    def allows(self) -> bool:
        return bool(self.document["Effect"] == "Allow")

    @property
    def actions(self) -> list[str]:
        return as_list(self.document.get("Action", self.document.get("NotAction")))

    def covers_action(self, action: str) -> bool:
        """Whether its Action or NotAction covers this one; IAM ignores case."""
        found = any(matches(action.lower(), each.lower(), {}) for each in self.actions)
        return found != ("NotAction" in self.document)

    def covers(self, call: ApiCall) -> bool:
        """Whether its Resource covers the call's, and its conditions hold."""
        is_not = "NotResource" in self.document
        # A trust policy names no resource, as it belongs to its role.
        patterns = as_list(self.document.get("NotResource", self.document.get("Resource", "*")))
        if any(_is_resource(each, call, is_not) for each in patterns) == is_not:
            return False
        try:
            return all(condition.holds(call.keys) for condition in self.conditions)
        except Unresolved:
            return False

    def names(self, caller: Caller) -> int:
        """Return how its Principal names the caller: ITSELF, EVERYBODY, ROLE, ACCOUNT or 0."""
        if "NotPrincipal" not in self.document:
            return _naming(self.document.get("Principal"), caller)
        listed = self.document["NotPrincipal"]
        if self.allows or caller.kind != "AssumedRole" or listed == "*":
            return 0 if _naming(listed, caller) else ITSELF
        # A Deny exempts a session only if it also lists the role and the account.
        account = _naming(listed, Caller(arn="", kind="User", account=caller.account))
        names = as_list(listed.get("AWS", []))
        return 0 if account and {caller.arn, caller.role} <= set(names) else ITSELF


def _is_resource(pattern: str, call: ApiCall, unresolved: bool) -> bool:
    """Whether a pattern matches the call's resource; `unresolved` if a variable has no value."""
    try:
        return matches(call.resource, pattern, call.keys)
    except Unresolved:
        return unresolved


def _naming(element: Any, caller: Caller) -> int:
    listed = element if isinstance(element, Mapping) else {}
    kind = caller.kind if caller.kind in ("Service", "Federated") else "AWS"
    names = as_list(listed.get(kind, []))
    if caller.arn in names:
        return ITSELF
    if element == "*" or "*" in as_list(listed.get("AWS", [])):
        return EVERYBODY
    if caller.role and caller.role in names:
        return ROLE
    accounts = {caller.account, f"arn:aws:iam::{caller.account}:root"} & set(names)
    return ACCOUNT if caller.account and accounts else 0


class PolicyDocument(NamedTuple):
    """A policy's statements; `kind` is the term for such a policy in AWS's messages."""

    kind: str
    statements: tuple[Statement, ...]

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def about(self, action: str) -> tuple[Statement, ...]:
        """Return the statements about an action; cached."""
        return tuple(each for each in self.statements if each.covers_action(action))


@functools.lru_cache(maxsize=4096)
def read_policy(name: str, kind: str, text: str) -> PolicyDocument:
    """Read a policy document, once; `name` says where it is."""
    found = []
    for number, each in enumerate(as_list(json.loads(text)["Statement"]), 1):
        conditions = tuple(
            # A JSON true counts as the text "true".
            Condition(
                operator=operator,
                key=key,
                values=tuple(str(value).replace("True", "true") for value in as_list(values)),
            )
            for operator, wanted in each.get("Condition", {}).items()
            for key, values in wanted.items()
        )
        sid = each.get("Sid") or f"#{number}"
        found.append(Statement(policy=name, name=sid, document=each, conditions=conditions))
    return PolicyDocument(kind=kind, statements=tuple(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """Whether a call is allowed, and by which statements, or why not, in AWS's words."""

    allowed: bool
    statements: tuple[Statement, ...] = ()
    why: str = ""


def evaluate(
    caller: Caller,
    call: ApiCall,
    *,
    identity: Sequence[PolicyDocument] = (),
    boundary: Sequence[PolicyDocument] = (),
    resource: Sequence[PolicyDocument] = (),
    needs_resource: bool = False,
) -> Ruling:
    """Return the policies' ruling on a call; a boundary of () means no boundary.

    `needs_resource`: the resource's policy must allow it, too, as with KMS keys and roles.
    """
    unknown: list[str] = []
    for document, statement, _ in _applying(
        caller, call, (*identity, *boundary, *resource), unknown
    ):
        if not statement.allows:
            article = "an" if document.kind == IDENTITY else "a"
            why = f"with an explicit deny in {article} {document.kind}"
            return Ruling(allowed=False, statements=(statement,), why=_told(why, unknown))
    granted = [(each, how) for _, each, how in _applying(caller, call, resource, unknown)]
    own = [each for _, each, _ in _applying(caller, call, identity, unknown)]
    strength = max((how for _, how in granted), default=0)
    has_policies = caller.kind in ("Account", "User", "AssumedRole")
    lacking = ""
    if not strength and (needs_resource or not has_policies):
        lacking = RESOURCE
    elif has_policies and strength <= ACCOUNT and not own:
        lacking = IDENTITY
    # The boundary does not limit what a resource's policy grants to everybody or to the caller.
    elif boundary and strength < EVERYBODY and not any(_applying(caller, call, boundary, unknown)):
        lacking = BOUNDARY
    if lacking:
        why = f"because no {lacking} allows the {call.action} action"
        return Ruling(allowed=False, why=_told(why, unknown))
    return Ruling(allowed=True, statements=(*(each for each, _ in granted), *own))


def _applying(
    caller: Caller, call: ApiCall, documents: Iterable[PolicyDocument], unknown: list[str]
) -> Iterator[tuple[PolicyDocument, Statement, int]]:
    """Yield the statements that apply, with how each names the caller."""
    for document in documents:
        for statement in document.about(call.action):
            how = statement.names(caller) if document.kind == RESOURCE else ITSELF
            if not how:
                continue
            try:
                applies = statement.covers(call)
            except UnknownCondition as error:
                unknown.append(f"{error} of {statement.policy} {statement.name}")
                applies = not statement.allows
            if applies:
                yield document, statement, how


def _told(why: str, unknown: Sequence[str]) -> str:
    if not unknown:
        return why
    return f"{why} (the embedded AWS does not know the {', the '.join(dict.fromkeys(unknown))})"
