"""Refusals as by IAM: actions that a drill denies to instances, with the service's own error.

Instances sign with the temporary credentials of their role (ASIA...), everybody else here does not.
S3 names no action in its requests; its denials are bucket policies.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from werkzeug.wrappers import Response

_ACTION = re.compile(r"(ec2|ssm|cloudwatch|sts):[A-Z][A-Za-z]+")
# Services that name the action in a header; the others do in the form.
_JSON_SERVICES = ("ssm",)


def check_actions(actions: frozenset[str]) -> frozenset[str]:
    """Refuse what could never be denied here."""
    for action in actions:
        if not _ACTION.fullmatch(action):
            raise ValueError(
                f"{action!r} cannot be denied; give one like ec2:TerminateInstances, of ec2, ssm, "
                "cloudwatch or sts"
            )
    return actions


def is_from_instance(environ: Mapping[str, Any]) -> bool:
    """Whether the credentials of an instance's role signed the request."""
    return "Credential=ASIA" in environ.get("HTTP_AUTHORIZATION", "")


def requested_action(service: str, environ: Mapping[str, Any], body: bytes) -> str:
    """Return the action that a request asks for, as IAM names it."""
    target = str(environ.get("HTTP_X_AMZ_TARGET", "")).rpartition(".")[2]
    name = target or parse_qs(body.decode(errors="replace")).get("Action", [""])[0]
    prefix = "cloudwatch" if service == "monitoring" else service
    return f"{prefix}:{name}"


def denial(service: str, action: str) -> Response:
    """Return the error that the service answers with when no policy allows the action."""
    message = f"User is not authorized to perform: {action}"
    if service in _JSON_SERVICES:
        content = json.dumps({"__type": "AccessDeniedException", "message": message})
        return Response(content, status=400, content_type="application/x-amz-json-1.1")
    if service == "ec2":
        text = f"You are not authorized to perform this operation. {message}"
        error = f"<Error><Code>UnauthorizedOperation</Code><Message>{text}</Message></Error>"
        content = f"<Response><Errors>{error}</Errors><RequestID>denied</RequestID></Response>"
    else:
        error = f"<Error><Code>AccessDenied</Code><Message>{message}</Message></Error>"
        content = f"<ErrorResponse>{error}<RequestId>denied</RequestId></ErrorResponse>"
    return Response(content, status=403, content_type="text/xml")
