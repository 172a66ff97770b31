"""Evidence for least privilege: which statements calls have used, and which calls were denied."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from embedded_aws.cloudformation.records import Stack, StackResource
from embedded_aws.iam.evaluation import (
    IDENTITY,
    RESOURCE,
    ApiCall,
    Caller,
    PolicyDocument,
    Ruling,
    Statement,
    read_policy,
)

# The stack of `cdk bootstrap`.
_NOT_OURS = "CDKToolkit"
# Where a policy is: its kind, its owner, and its name if the owner may have several.
Key = tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Evidence:
    """The calls so far, with their rulings; thread-safe."""

    stacks: Callable[[], Iterable[Stack]]
    policies_of: Callable[[StackResource], Iterable[tuple[Key, str]]]
    _used: dict[Statement, Counter[str]] = field(default_factory=dict)
    _denied: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    _places: dict[Key, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, caller: Caller, call: ApiCall, ruling: Ruling) -> None:
        """Record one call's ruling."""
        with self._lock:
            for statement in ruling.statements:
                self._used.setdefault(statement, Counter())[call.action] += 1
            if not ruling.allowed:
                who = caller.role.rpartition("/")[2] or caller.arn
                self._denied[who, call.action, call.resource, ruling.why] += 1

    def read(self, key: Key, text: str) -> PolicyDocument:
        """Return a policy's document, whose statements say where in our stacks they are."""
        if key not in self._places:
            path = next((path for path, each in self.resources() if each.physical_id == key[1]), "")
            # Drop CDK's hash from a generated name.
            more = [re.sub("[0-9A-F]{8}$", "", name) for name in key[2:]] or [key[0]]
            self._places[key] = f"{path} {more[0]}" if path else ""
        return read_policy(self._places[key], IDENTITY if key[0] == "identity" else RESOURCE, text)

    def report(self) -> dict[str, Any]:
        """Return every statement of the deployed stacks with its calls, and all denied calls."""
        deployed = [
            statement
            for _, resource in self.resources()
            for key, text in self.policies_of(resource)
            for statement in self.read(key, text).statements
        ]
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        with self._lock:
            for each in dict.fromkeys([*deployed, *self._used]):
                if "/" in each.policy and not each.policy.startswith(_NOT_OURS):
                    row = rows.setdefault((each.policy, each.name), _row(each))
                    row["calls"] = dict(Counter(row["calls"]) + self._used.get(each, Counter()))
            denied = [
                {"caller": who, "action": action, "resource": resource, "why": why, "times": n}
                for (who, action, resource, why), n in sorted(self._denied.items())
            ]
        return {"statements": [rows[key] for key in sorted(rows)], "denied": denied}

    def forget(self) -> None:
        """Forget everything, before the next drill."""
        with self._lock:
            self._used.clear()
            self._denied.clear()

    def resources(self) -> Iterator[tuple[str, StackResource]]:
        """Yield the stacks' resources with their paths in the CDK app, or their logical ids."""
        for stack in list(self.stacks()):
            for resource in list(stack.resources.values()) if stack.deleted is None else ():
                path = (resource.metadata or {}).get("aws:cdk:path", "")
                short = path.removesuffix("/Resource")
                yield short or f"{stack.name}/{resource.logical_id}", resource


def _row(statement: Statement) -> dict[str, Any]:
    return {
        "policy": statement.policy,
        "statement": re.sub("([0-9A-F]{7,8})?-[0-9A-F]{12}$", "", statement.name),
        "effect": "Allow" if statement.allows else "Deny",
        "actions": statement.actions,
        "calls": {},
    }
