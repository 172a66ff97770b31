"""Calls that most resource types make alike: look a resource up, delete it by its physical id."""

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from cloudformation.resource import ResourceRequest

# How the services' error codes say that something does not exist.
_ABSENT = ("NotFound", "NoSuch", "NotFoundException", "404", "DoesNotExist", "NonExistent")


def is_absent(error: ClientError) -> bool:
    """Whether a service's error says that the resource does not exist."""
    code = str(error.response["Error"].get("Code", ""))
    return any(word in code for word in _ABSENT)


def look_up(operation: Callable[..., Any], **arguments: Any) -> Any:
    """Return the response of a describe or get, None where the resource does not exist."""
    try:
        return operation(**arguments)
    except ClientError as error:
        if is_absent(error):
            return None
        raise


def is_found(operation: Callable[..., Any], **arguments: Any) -> bool:
    """Whether a describe or get finds the resource."""
    return look_up(operation, **arguments) is not None


def finds(
    service: str, operation: str, argument: str, *, listed: bool = False
) -> Callable[[ResourceRequest], bool]:
    """Make a type's `exists`: whether the operation finds the physical id (`listed`: a list)."""

    def exists(request: ResourceRequest) -> bool:
        name: Any = [request.physical_id] if listed else request.physical_id
        return is_found(getattr(request.client(service), operation), **{argument: name})

    return exists


def deletes(
    service: str, operation: str, argument: str, *, listed: bool = False
) -> Callable[[ResourceRequest], None]:
    """Make a type's `delete`: call the operation with the physical id (`listed`: a list)."""

    def delete(request: ResourceRequest) -> None:
        name: Any = [request.physical_id] if listed else request.physical_id
        getattr(request.client(service), operation)(**{argument: name})

    return delete
