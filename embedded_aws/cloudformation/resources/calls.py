"""Factories for most types' create, find and delete functions: rows that name API operations.

The service's own API model (from botocore) says which properties an operation takes, and in what
form. A type that behaves differently has its own function next to its row.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from embedded_aws.cloudformation.intrinsics import scalar
from embedded_aws.cloudformation.resource import HandlerRequest, Provisioned

# Parts of the services' error codes for something that does not exist.
_ABSENT = ("NotFound", "NoSuch", "NotFoundException", "404", "DoesNotExist", "NonExistent")


def is_absent(error: ClientError) -> bool:
    """Whether a service's error says that the resource does not exist."""
    code = str(error.response["Error"].get("Code", ""))
    return any(word in code for word in _ABSENT)


def call(request: HandlerRequest, service: str, operation: str, **more: Any) -> Any:
    """Call an operation with the properties that it takes; `more` adds or replaces arguments.

    Arguments that are None are left out.
    """
    return _send(request, service, operation, {**request.properties, **more})


def look_up(request: HandlerRequest, service: str, operation: str, **which: Any) -> Any:
    """Return the response of a describe or get, or None if the resource does not exist."""
    try:
        return _send(request, service, operation, which)
    except ClientError as error:
        if is_absent(error):
            return None
        raise


def _send(request: HandlerRequest, service: str, operation: str, values: dict[str, Any]) -> Any:
    client = request.client(service)
    model = client.meta.service_model
    shape = model.operation_model(client.meta.method_to_api_mapping[operation]).input_shape
    members = {name.lower(): name for name in shape.members}
    arguments = {
        members[name.lower()]: value for name, value in values.items() if name.lower() in members
    }
    return getattr(client, operation)(
        **{
            name: _in_form(value, shape.members[name])
            for name, value in arguments.items()
            if value is not None
        }
    )


def _in_form(value: Any, shape: Any) -> Any:
    """Convert a template's value to the form of an API's shape; leave unknown members unchanged."""
    kind = shape.type_name
    if kind == "structure" and isinstance(value, dict):
        members = {name.lower(): name for name in shape.members}
        return {
            members[key.lower()]: _in_form(item, shape.members[members[key.lower()]])
            if key.lower() in members
            else item
            for key, item in value.items()
        }
    if kind == "list":
        if isinstance(value, dict):
            value = tag_list(value)
        items = value if isinstance(value, list) else [value]
        return [_in_form(item, shape.member) for item in items]
    if kind == "map":
        pairs = tag_map(value) if isinstance(value, list) else value
        return {key: _in_form(item, shape.value) for key, item in pairs.items()}
    if kind == "string" and not isinstance(value, str):
        return json.dumps(value) if isinstance(value, dict | list) else scalar(value)
    return value


def creates(
    service: str,
    operation: str,
    *,
    name: str = "",
    argument: str = "",
    longest: int = 64,
    lower: bool = False,
    tag_kind: str = "",
    answer: str = "",
    by: str = "",
    attributes: Mapping[str, str] | Sequence[str] = (),
    arn: str = "",
    more: Callable[[HandlerRequest], dict[str, Any]] = lambda request: {},
) -> Callable[[HandlerRequest], Provisioned]:
    """Make a type's `create`, which is also its `update` if the operation is a put.

    `name` is the property with the physical name, which is generated if the template sets none;
    the operation takes it as `argument`, by default under the same name. Without a `name`, the id
    is the member `by` of the response's `answer`. `attributes` are members of the `answer`, by the
    names that Fn::GetAtt takes; `arn` is the end of the resource's ARN. `tag_kind` is EC2's word
    for the type in tag specifications; `more` returns the arguments whose form or name differs
    from the property's.
    """
    members = attributes if isinstance(attributes, Mapping) else {key: key for key in attributes}

    def create(request: HandlerRequest) -> Provisioned:
        physical, arguments = "", more(request)
        if name:
            physical = (
                request.get(name)
                or request.physical_id
                or request.generated_name(longest=longest, lower=lower)
            )
            arguments[argument or name] = physical
        if tag_kind and (tags := request.get("Tags")):
            arguments["TagSpecifications"] = [{"ResourceType": tag_kind, "Tags": tags}]
        made = call(request, service, operation, **arguments)
        made = made[answer] if answer else made
        found = {key: _only(made[member]) for key, member in members.items()}
        physical = _only(made[by]) if by else physical
        if arn:
            found["Arn"] = request.account.arn(service, arn.format(physical))
        return Provisioned(id=physical, attributes=found)

    return create


def _only(value: Any) -> Any:
    """Return a value, or a list's only item: some operations create several and return a list."""
    return value[0] if isinstance(value, list) else value


def deletes(
    service: str, operation: str, *properties: str, by: str = ""
) -> Callable[[HandlerRequest], None]:
    """Make a type's `delete`, which passes the id as `by`, and the named properties."""

    def delete(request: HandlerRequest) -> None:
        _send(request, service, operation, _identity(request, properties, by))

    return delete


def finds(
    service: str,
    operation: str,
    *properties: str,
    by: str = "",
    answer: str = "",
    where: Callable[[HandlerRequest, Any], bool] = lambda request, item: True,
) -> Callable[[HandlerRequest], bool]:
    """Make a type's `exists`, which is true if the operation finds the id.

    `where` must hold for the response, or for an item of its list `answer`.
    """

    def exists(request: HandlerRequest) -> bool:
        found = look_up(request, service, operation, **_identity(request, properties, by))
        items = found[answer] if found and answer else [found]
        return found is not None and any(where(request, item) for item in items)

    return exists


def _identity(request: HandlerRequest, properties: Sequence[str], by: str) -> dict[str, Any]:
    return request.pick(*properties) | ({by: request.physical_id} if by else {})


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_map(tags: list[dict[str, str]] | Mapping[str, str] | None) -> dict[str, str]:
    if isinstance(tags, Mapping):
        return dict(tags)
    return {tag["Key"]: tag["Value"] for tag in tags or []}


def retag(
    request: HandlerRequest,
    service: str,
    tag: str = "tag_resource",
    untag: str = "untag_resource",
    **resource: Any,
) -> None:
    """Replace an existing resource's tags with the new ones; `resource` holds its identifier."""
    old, new = tag_map(request.old.get("Tags")), tag_map(request.get("Tags"))
    gone = sorted(set(old) - set(new))
    if gone:
        # Every service takes just the keys, except EC2, which takes them as Tags.
        keys = {"TagKeys": gone, "Tags": [{"Key": key} for key in gone]}
        _send(request, service, untag, {**resource, **keys})
    if request.old and new and new != old:
        _send(request, service, tag, {**resource, "Tags": tag_list(new)})
