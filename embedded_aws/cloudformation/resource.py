"""The interface of a resource type's handlers: HandlerRequest, Provisioned, ResourceType."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from embedded_aws.cloudformation.account import RegionalAccount


@dataclass(frozen=True, kw_only=True, slots=True)
class HandlerRequest:
    """One resource with the properties that the template sets.

    For an update, `old` has its current properties. For an update, a deletion or a check that it
    exists, `physical_id` and `attributes` identify the resource.
    """

    account: RegionalAccount
    stack_name: str
    logical_id: str
    properties: dict[str, Any]
    old: dict[str, Any] = field(default_factory=dict)
    physical_id: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        return self.account.client(service)

    def get(self, name: str, default: Any = None) -> Any:
        return self.properties.get(name, default)

    def pick(self, *names: str) -> dict[str, Any]:
        """Return the named properties that are set."""
        return {name: self.properties[name] for name in names if name in self.properties}

    def changed(self, name: str) -> bool:
        return bool(self.properties.get(name) != self.old.get(name))

    def added(self, name: str) -> list[Any]:
        """Return the items of a list property that its current value lacks."""
        return [item for item in self.get(name, []) if item not in self.old.get(name, [])]

    def removed(self, name: str) -> list[Any]:
        """Return the items that a list property loses."""
        return [item for item in self.old.get(name, []) if item not in self.get(name, [])]

    def emptied(self) -> "HandlerRequest":
        """Return the request that unsets every property, to send before deleting the resource."""
        return replace(self, properties={}, old=self.properties)

    def generated_name(self, *, longest: int, lower: bool = False) -> str:
        """Return a physical name as CloudFormation generates it: stack, logical id, random end."""
        end = uuid.uuid4().hex[:12]
        end = end if lower else end.upper()
        space = longest - len(end) - 1
        half = max(space - len(self.logical_id) - 1, space // 2)
        start = f"{self.stack_name[:half]}-{self.logical_id}"[:space]
        name = f"{start}-{end}"
        return name.lower() if lower else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Provisioned:
    """An existing resource: what Ref returns, and what Fn::GetAtt returns by name."""

    id: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceType:
    """Functions that create, update, delete and find one resource type through its service's API.

    `configure` runs after `create` (if it fails, the id to delete is known) and doubles as the
    update if there is no `update`; without either, an update in place is refused, and so is one of
    the properties in `fixed`. `volatile` names the attributes that an update may change.
    """

    create: Callable[[HandlerRequest], Provisioned]
    delete: Callable[[HandlerRequest], None]
    exists: Callable[[HandlerRequest], bool]
    configure: Callable[[HandlerRequest], None] | None = None
    update: Callable[[HandlerRequest], Provisioned] | None = None
    fixed: frozenset[str] = frozenset()
    volatile: frozenset[str] = frozenset()


Registry = Mapping[str, ResourceType]
