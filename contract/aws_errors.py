"""What errors of AWS say to a person: settings that no retry heals, and who denies a call.

They are told by their names, as this room imports the standard library alone.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contract.errors import UserError

# fmt: off
# botocore's errors of the network, and of a machine's own credentials: those pass.
_PASSING = {
    "CapacityNotAvailableError", "ChecksumError", "ConnectionError", "FlexibleChecksumError",
    "HTTPClientError", "IncompleteReadError", "MetadataRetrievalError", "WaiterError",
}
# Answers of AWS: whose credentials, or at what time, is in doubt; never whether they may.
_UNACCEPTED = {
    "AuthFailure", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId",
    "InvalidClientTokenId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired",
    "UnrecognizedClientException",
}
# fmt: on
DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"}
_MACHINES_OWN = ("iam-role", "container-role")
# The AWS CLI of .venv is version 1, which has none of these commands.
NEWER_CLI = "with AWS CLI 2, in a shell without .venv"
_LOG_IN = f"export AWS_PROFILE=NAME, or make one {NEWER_CLI}: aws configure sso && aws sso login"
# What to do about the others, the special before the general.
_ADVICE = {
    "ProfileNotFound": "~/.aws has those that exist: export AWS_PROFILE=NAME",
    "LoginError": f"log in again {NEWER_CLI}: aws login",
    "SSOError": f"log in again {NEWER_CLI}: aws sso login",
    "TokenRetrievalError": f"log in again {NEWER_CLI}: aws sso login",
    "NoCredentialsError": _LOG_IN,
    "NoRegionError": "export AWS_REGION=us-east-1 AWS_DEFAULT_REGION=us-east-1",
    "CredentialRetrievalError": "`aws sts get-caller-identity` must work first",
    "ParamValidationError": "correct the name",
}
_CORRECT = "correct ~/.aws/config or the AWS_* variables"
# Kinds of policies, as AWS's messages name them (IAM's guide, "Troubleshoot access denied error
# messages"), and who can allow what they deny.
_WHO_ALLOWS = {
    "service control policy": "only the organization's administrators can allow it, no credentials "
    "of this account",
    "resource control policy": "only the organization's administrators can allow it",
    "permissions boundary": "an administrator must allow it in the boundary as well as in a policy",
    "session policy": "sign in without this session's policy, or with one that allows it",
    "VPC endpoint policy": "the VPC's owner must allow it in the endpoint's policy",
    "role trust policy": "the role's owner must name these credentials in its trust policy",
    "identity-based policy": "an administrator must allow it to these credentials",
    "resource-based policy": "whoever owns the {owned} must allow it in the {owned}'s policy",
}
_OWNED = {"s3": "bucket", "kms": "key"}


class SettingsError(UserError):
    """AWS settings, or credentials, that neither a retry nor another machine would heal."""


def settings_fault(error: BaseException) -> str | None:
    """Return what is wrong with the settings, and what to do; None for an error that may pass."""
    if isinstance(error, SettingsError):
        return str(error)
    names = _names(error)
    if "BotoCoreError" not in names or not _PASSING.isdisjoint(names):
        return None
    provider = getattr(error, "kwargs", {}).get("provider")
    if "CredentialRetrievalError" in names and provider in _MACHINES_OWN:
        return None
    advice = next((text for name, text in _ADVICE.items() if name in names), _CORRECT)
    return f"{_one_line(error)}: {advice}"


@contextmanager
def settings_checked() -> Iterator[None]:
    """Raise SettingsError if a session or client cannot be made; trouble that passes stays itself.

    The program, file or variable that a profile names may also fail in ways that botocore does not
    expect.
    """
    try:
        yield
    except Exception as error:
        fault = settings_fault(error)
        is_odd = isinstance(error, OSError | RuntimeError | ValueError | KeyError)
        if fault is None and is_odd and "BotoCoreError" not in _names(error):
            what = f"AWS's settings cannot be used ({_one_line(error)})"
            fault = f"{what}: {_ADVICE['CredentialRetrievalError']}"
        if fault is None:
            raise
        raise SettingsError(fault) from error


def checked(session: Any, *, needs_some: bool = True) -> Any:
    """Return a session of boto3 or botocore, its credentials looked up, or renewed if due."""
    with settings_checked():
        if (found := session.get_credentials()) is not None:
            found.get_frozen_credentials()
        elif needs_some:
            raise SettingsError(f"no AWS credentials found: {_ADVICE['NoCredentialsError']}")
    return session


def explain(error: BaseException) -> str | None:
    """Return what a person can do about an error of AWS; None for one that may pass."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return settings_fault(error)
    code = response.get("Error", {}).get("Code", "")
    message = response.get("Error", {}).get("Message", "")
    if code in _UNACCEPTED:
        return f"AWS does not accept these credentials ({code}): {_LOG_IN}"
    return explain_denial(message, getattr(error, "operation_name", "")) if code in DENIED else None


def explain_denial(message: str, call: str) -> str:
    """Say in one clause what AWS denied, by which kind of policy, and who can allow it.

    `call` is the operation, for services whose message does not name the action.
    """
    found = re.search(r"perform: ([\w-]+:\w+)", message)
    action = found[1] if found else call
    kind = re.search(rf"\b({'|'.join(_WHO_ALLOWS)})", message)
    if kind is None:
        return f"these credentials may not call {action}"
    owned = _OWNED.get(action.partition(":")[0], "resource")
    how = "denies" if "explicit deny" in message else "would have to allow"
    named = f"the {owned}'s policy" if "resource-based" in kind[1] else f"a {kind[1]}"
    named = named.replace("a identity", "an identity")
    return f"{named} {how} {action}: {_WHO_ALLOWS[kind[1]].format(owned=owned)}"


def _names(error: BaseException) -> list[str]:
    return [each.__name__ for each in type(error).__mro__]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".:")
