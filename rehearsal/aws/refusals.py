"""What an instance asks of AWS, and how it is refused: in each service's own words and format.

Instances sign with the temporary credentials of their role (ASIA...), everybody else here does not.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, unquote

from werkzeug.wrappers import Response

# Services that name the action in a header and answer in JSON; the others answer in XML.
_JSON_SERVICES = ("ssm",)
# How far a request's signed time may be from AWS's.
_MAX_SKEW = timedelta(minutes=15)
_SIGNED_AT = "%Y%m%dT%H%M%SZ"


def is_from_instance(environ: Mapping[str, Any]) -> bool:
    """Whether the credentials of an instance's role signed the request."""
    return "Credential=ASIA" in environ.get("HTTP_AUTHORIZATION", "")


def requested(service: str, environ: Mapping[str, Any], body: bytes) -> tuple[str, str]:
    """Return the action that a request asks for, as IAM names it, and S3's key."""
    if service == "s3":
        _, _, key = unquote(environ.get("PATH_INFO", "")).lstrip("/").partition("/")
        return f"s3:{_s3_action(environ, key)}", key
    target = str(environ.get("HTTP_X_AMZ_TARGET", "")).rpartition(".")[2]
    name = target or parse_qs(body.decode(errors="replace")).get("Action", [""])[0]
    prefix = "cloudwatch" if service == "monitoring" else service
    return f"{prefix}:{name}", ""


def _s3_action(environ: Mapping[str, Any], key: str) -> str:
    method = environ["REQUEST_METHOD"]
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    if method in ("GET", "HEAD"):
        return "GetObject" if key else "ListBucket"
    if "delete" in query or (method == "DELETE" and "uploadId" not in query):
        return "DeleteObject"
    return "AbortMultipartUpload" if method == "DELETE" else "PutObject"


def refusal(service: str, action: str, status: int) -> Response:
    """Return the error of a status; 403 is that of an action that no policy allows."""
    is_s3 = service == "s3"
    if status == 403:
        denials = {"ec2": "UnauthorizedOperation", "ssm": "AccessDeniedException"}
        message = f"User is not authorized to perform: {action}"
        return _answer(service, denials.get(service, "AccessDenied"), message, status)
    codes = {404: "NoSuchKey" if is_s3 else "NotFound", 503: "SlowDown" if is_s3 else "Throttling"}
    message = f"rehearsed: {action} answers {status}"
    return _answer(service, codes.get(status, "InternalError"), message, status)


def skew_refusal(service: str, environ: Mapping[str, Any], now: datetime) -> Response | None:
    """Return the error of a request that was signed too far from `now`, AWS's time; else None."""
    signed = environ.get("HTTP_X_AMZ_DATE", "")
    if not re.fullmatch(r"\d{8}T\d{6}Z", signed):
        return None
    if abs(now - datetime.strptime(signed, _SIGNED_AT).replace(tzinfo=UTC)) <= _MAX_SKEW:
        return None
    if service == "s3":
        message = "The difference between the request time and the current time is too large."
        return _answer(service, "RequestTimeTooSkewed", message, 403)
    code = "RequestExpired" if service == "ec2" else "SignatureDoesNotMatch"
    message = f"Signature expired: {signed} is not within 15 min. of {now.strftime(_SIGNED_AT)}"
    return _answer(service, code, message, 400 if service in ("ec2", *_JSON_SERVICES) else 403)


def _answer(service: str, code: str, message: str, status: int) -> Response:
    if service in _JSON_SERVICES:
        content = json.dumps({"__type": code, "message": message})
        # Its errors, those of permissions too, have status 400.
        status = status if status >= 500 else 400
        return Response(content, status=status, content_type="application/x-amz-json-1.1")
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    if service == "ec2":
        text = f"<Response><Errors>{error}</Errors><RequestID>refused</RequestID></Response>"
    elif service == "s3":
        text = error
    else:
        text = f"<ErrorResponse>{error}<RequestId>refused</RequestId></ErrorResponse>"
    return Response(text, status=status, content_type="text/xml")
