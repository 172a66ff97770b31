"""What a resource type's functions get and give: Wish, Made, ResourceType."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudformation.account import Account


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """One resource as the template wants it.

    For an update `old` holds the properties it has; for an update, a deletion and the question
    whether it exists `physical_id` and `attributes` say which resource is meant.
    """

    account: Account
    stack_name: str
    stack_id: str
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
        """The named properties, where given: many have the same name and shape in the API."""
        return {name: self.properties[name] for name in names if name in self.properties}

    def changed(self, name: str) -> bool:
        return bool(self.properties.get(name) != self.old.get(name))

    def generated_name(self, *, longest: int, lower: bool = False) -> str:
        """A physical name as CloudFormation makes it: stack, logical id, random end."""
        end = uuid.uuid4().hex[:12]
        end = end if lower else end.upper()
        room = longest - len(end) - 1
        half = max(room - len(self.logical_id) - 1, room // 2)
        start = f"{self.stack_name[:half]}-{self.logical_id}"[:room]
        name = f"{start}-{end}"
        return name.lower() if lower else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A resource that now exists: what Ref gives, and what Fn::GetAtt gives by name."""

    id: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceType:
    """How one resource type is made, changed, deleted and looked for, by its service's own API.

    `configure` runs after `create` (so that what a failure leaves behind is known by its id) and
    is the update where there is no `update`; with neither, a change in place is refused.
    `volatile` names the attributes that an update may change.
    """

    create: Callable[[Wish], Made]
    delete: Callable[[Wish], None]
    exists: Callable[[Wish], bool]
    configure: Callable[[Wish], None] | None = None
    update: Callable[[Wish], Made] | None = None
    volatile: frozenset[str] = frozenset()


Registry = Mapping[str, ResourceType]


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_map(tags: list[dict[str, str]] | None) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags or []}
