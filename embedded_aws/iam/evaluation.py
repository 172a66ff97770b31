"""AWS's policy evaluation logic: whether policies allow a call, as a pure function.

Explicit denies come first, then the grants of a resource's policy, then identity policies within
the permissions boundary; all in one account. If a condition cannot be evaluated here, a Deny
denies, an Allow allows nothing, and the ruling names the condition.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from embedded_aws.iam.conditions import (
    Condition,
    Keys,
    UnknownCondition,
    Unresolved,
    as_list,
    matches,
)

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
