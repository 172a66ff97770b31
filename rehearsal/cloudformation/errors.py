"""Refusals of the stack engine, with the codes and the words of the real CloudFormation."""

from moto.core.exceptions import ServiceException


class Refusal(ServiceException):
    """An answer of CloudFormation that is an error: a code of its API and one sentence."""

    def __init__(self, message: str, code: str = "ValidationError") -> None:
        super().__init__(code, message)

    def __str__(self) -> str:
        return str(self.message)


class ResourceFailed(ValueError):
    """One resource could not be made, changed or deleted; the message goes into its event."""


def no_such_stack(name: str) -> Refusal:
    return Refusal(f"Stack with id {name} does not exist")


def no_such_change_set(name: str) -> Refusal:
    return Refusal(f"ChangeSet [{name}] does not exist", "ChangeSetNotFound")
