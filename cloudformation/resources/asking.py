"""Questions to a service whose answer may be "no such thing"."""

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

# The words in which the services say that something does not exist.
_ABSENT = ("NotFound", "NoSuch", "NotFoundException", "404", "DoesNotExist", "NonExistent")


def is_absent(error: ClientError) -> bool:
    code = str(error.response["Error"].get("Code", ""))
    return any(word in code for word in _ABSENT)


def ask(question: Callable[..., Any], **arguments: Any) -> Any:
    """The answer of a describe or get, or None where the thing does not exist."""
    try:
        return question(**arguments)
    except ClientError as error:
        if is_absent(error):
            return None
        raise


def known(question: Callable[..., Any], **arguments: Any) -> bool:
    """Whether a describe or get finds the thing."""
    return ask(question, **arguments) is not None
