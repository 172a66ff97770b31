"""The engine's errors, with the codes and messages of the real CloudFormation."""


class CloudFormationError(Exception):
    """A request that CloudFormation refuses, with its API's message and error code."""

    def __init__(self, message: str, code: str = "ValidationError") -> None:
        super().__init__(message)
        # moto's serializer reads both.
        self.message = message
        self.code = code


class ResourceFailed(ValueError):
    """A resource could not be created, updated or deleted; the message goes into its event."""


def format_error(why: str) -> CloudFormationError:
    return CloudFormationError(f"Template format error: {why}")


def template_error(why: str) -> CloudFormationError:
    return CloudFormationError(f"Template error: {why}")


def no_such_stack(name: str) -> CloudFormationError:
    return CloudFormationError(f"Stack with id {name} does not exist")
