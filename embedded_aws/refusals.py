"""Refusals of requests, in each service's own words and format."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from werkzeug.wrappers import Response

from embedded_aws.iam.access import Denied
from embedded_aws.iam.evaluation import Caller
from embedded_aws.iam.sessions import INSTANCE_KEY

# How far a request's signed time may be from AWS's.
_MAX_SKEW = timedelta(minutes=15)
_SIGNED_AT = "%Y%m%dT%H%M%SZ"


def is_from_instance(environ: Mapping[str, Any], caller: Caller) -> bool:
    """Whether an instance signed the request; temporary keys that were never issued count too."""
    is_temporary = "Credential=ASIA" in environ.get("HTTP_AUTHORIZATION", "")
    return is_temporary and (INSTANCE_KEY in caller.keys or caller.kind == "Account")


def denial(service: str, environ: Mapping[str, Any], denied: Denied) -> Response:
    """Return the error of an action that policies do not allow, in AWS's words."""
    one, why = denied.call, denied.why
    resource = f'"{one.resource}"' if service == "s3" else one.resource
    message = (
        f"User: {denied.caller.arn} is not authorized to perform: {one.action} on resource: "
        f"{resource} {why}"
    )
    if one.action.startswith("s3:DeleteObject") and environ["REQUEST_METHOD"] == "POST":
        # A call that deletes several objects succeeds and refuses each one; here it refuses all.
        asked = ElementTree.fromstring(environ["wsgi.input"].getvalue()).iterfind(".//{*}Key")
        said = f"<Code>AccessDenied</Code><Message>{escape(message)}</Message>"
        errors = (f"<Error><Key>{escape(key.text or '')}</Key>{said}</Error>" for key in asked)
        return Response(f"<DeleteResult>{''.join(errors)}</DeleteResult>", content_type="text/xml")
    return _denied(service, environ, message)


def refusal(service: str, environ: Mapping[str, Any], action: str, status: int) -> Response:
    """Return the error of a drill's fault; 403 is the error for an action that no policy allows."""
    is_s3 = service == "s3"
    if status == 403:
        return _denied(service, environ, f"User is not authorized to perform: {action}")
    codes = {
        404: "NoSuchKey" if is_s3 else "NotFound",
        429: "TooManyRequestsException" if service == "batch" else "ThrottlingException",
        503: "SlowDown" if is_s3 else "Throttling",
    }
    message = f"rehearsed: {action} answers {status}"
    return answer_error(service, environ, codes.get(status, "InternalError"), message, status)


def _denied(service: str, environ: Mapping[str, Any], message: str) -> Response:
    code = "AccessDeniedException" if _is_json(environ) else "AccessDenied"
    if service == "ec2":
        code = "UnauthorizedOperation"
        message = f"You are not authorized to perform this operation. {message}"
    return answer_error(service, environ, code, message, 403)


def skew_refusal(service: str, environ: Mapping[str, Any], now: datetime) -> Response | None:
    """Return the error for a request signed too far from `now`, AWS's time, or None."""
    signed = environ.get("HTTP_X_AMZ_DATE", "")
    if not re.fullmatch(r"\d{8}T\d{6}Z", signed):
        return None
    if abs(now - datetime.strptime(signed, _SIGNED_AT).replace(tzinfo=UTC)) <= _MAX_SKEW:
        return None
    if service == "s3":
        message = "The difference between the request time and the current time is too large."
        return answer_error(service, environ, "RequestTimeTooSkewed", message, 403)
    code = "RequestExpired" if service == "ec2" else "SignatureDoesNotMatch"
    message = f"Signature expired: {signed} is not within 15 min. of {now.strftime(_SIGNED_AT)}"
    return answer_error(service, environ, code, message, 400 if service == "ec2" else 403)


def _is_json(environ: Mapping[str, Any]) -> bool:
    """Whether the request, and so its answer, is in JSON rather than XML."""
    return "json" in environ.get("CONTENT_TYPE", "")


def answer_error(
    service: str, environ: Mapping[str, Any], code: str, message: str, status: int
) -> Response:
    """Return an error in the service's format."""
    if _is_json(environ) and service != "s3":
        content = json.dumps({"__type": code, "message": message})
        # Errors of JSON services, including denials, have status 400.
        status = status if status >= 500 or service == "batch" else 400
        return Response(content, status=status, content_type="application/x-amz-json-1.1")
    message = escape(message)
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    if service == "ec2":
        text = f"<Response><Errors>{error}</Errors><RequestID>refused</RequestID></Response>"
    elif service == "s3":
        text = error
    else:
        text = f"<ErrorResponse>{error}<RequestId>refused</RequestId></ErrorResponse>"
    return Response(text, status=status, content_type="text/xml")
