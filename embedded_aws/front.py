"""The WSGI front of the embedded AWS: IAM first, CloudFormation to our engine, the rest to moto.

It refuses what AWS refuses and moto does not: names, descriptions, checksums, unknown uploads.
Each of moto's services handles one request at a time, as moto is not thread-safe: it checks
If-Match and writes in two steps, and lists dictionaries that another request may be changing.
"""

import io
import re
import socket
import struct
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Never
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from botocore import xform_name
from moto.core.parse import QueryParser
from moto.core.serialize import QuerySerializer, SerializationContext
from moto.core.utils import get_service_model
from werkzeug.datastructures import MultiDict
from werkzeug.wrappers import Request, Response

from embedded_aws.cloudformation.errors import CloudFormationError
from embedded_aws.faults import GUARD, JOB_SERVICES, MACHINES, SUBMITTERS, Fault, FaultInjector
from embedded_aws.iam.access import AccessControl, Denied
from embedded_aws.iam.requests import asked
from embedded_aws.iam.sessions import FUNCTION_KEY, INSTANCE_KEY, NOBODY
from embedded_aws.limits import Limits
from embedded_aws.mistakes import find_mistake
from embedded_aws.moto_services import answer_error, is_in_json, moto_services, signed_for
from embedded_aws.service_jobs import ServiceJobs


class Front:
    """The WSGI application."""

    def __init__(self, cloudformation: object, access: AccessControl | None = None) -> None:
        """Without `access`, everybody may do everything."""
        self.cloudformation = cloudformation
        self.access = access
        self.jobs: ServiceJobs | None = None
        self.limits: Limits | None = None
        self.faults = FaultInjector()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        service, _ = signed_for(environ)
        # The body is read before the lock is taken, so that a slow client does not block others.
        body = _body_of(environ)
        environ["wsgi.input"] = io.BytesIO(body)
        fault, refused = self._faulty(service, environ, body)
        if refused is None and self.access is not None:
            denied = self.access.refuses(service, environ, body)
            refused = denied and denial(service, environ, denied)
            if refused is None and self.limits is not None:
                account = self.access.account
                mistake = find_mistake(self.limits, service, environ, body, account)
                refused = mistake and answer_error(service, environ, *mistake)
        if refused is not None:
            return refused(environ, start_response)
        if self.jobs is not None and (own := self.jobs.answer(service, environ, body)) is not None:
            response = own
        elif service == "cloudformation":
            # Without a lock: an operation calls the other services, and some responses wait.
            response = answer_cloudformation(Request(environ), self.cloudformation)
        else:
            # A group starts and ends EC2's instances.
            with self.alone_in("ec2" if service == "autoscaling" else service):
                response = moto_services(environ)
        if response.status_code == 404 and service == "s3" and self.access is not None:
            denied = self.access.hides(environ, body)
            response = denial(service, environ, denied) if denied else response
        if fault is not None and fault.loses_answer:
            reset(environ["werkzeug.socket"])
        answer = response(environ, start_response)
        if fault is not None and fault.bytes_per_second:
            return self.faults.paced(answer, fault.bytes_per_second)
        return answer

    def _faulty(
        self, service: str, environ: dict[str, Any], body: bytes
    ) -> tuple[Fault | None, Response | None]:
        """Return the fault that hits a request, and the refusal if it is refused."""
        caller = self.access.sessions.find(environ, body) if self.access else NOBODY
        of = GUARD if FUNCTION_KEY in caller.keys else MACHINES
        if of == MACHINES and INSTANCE_KEY not in caller.keys:
            if service not in JOB_SERVICES:
                return None, None
            of = SUBMITTERS
        ahead = 0.0 if of == GUARD else self.faults.clock_ahead_seconds  # Lambda's clock is right
        now = datetime.now(UTC) + timedelta(seconds=ahead)
        if (refused := skew_refusal(service, environ, now)) is not None:
            return None, refused
        one = asked(service, environ, body, ("", ""))[0]
        key = one.resource.partition("/")[2] if service == "s3" else ""
        fault = self.faults.meet(one.action, key, of)
        if fault is None or not fault.status:
            return fault, None
        return fault, refusal(service, environ, one.action, fault.status)

    def alone_in(self, service: str) -> threading.Lock:
        """Return the lock that keeps the service's other requests waiting."""
        return self._locks[service]


def reset(connection: socket.socket) -> Never:
    """Reset a connection instead of answering; the server takes it for a client that hung up."""
    # Closing without lingering makes TCP send a reset; nothing more is read from the connection.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RD)
    connection.close()
    raise ConnectionResetError("rehearsed: this answer is lost")


def _body_of(environ: Mapping[str, Any]) -> bytes:
    stream = environ["wsgi.input"]
    if environ.get("wsgi.input_terminated"):  # chunked: the server finds the end
        try:
            return bytes(stream.read())
        except OSError as error:
            # A machine was killed in mid-request; the server ignores clients that hang up.
            raise ConnectionResetError(str(error)) from error
    return bytes(stream.read(int(environ.get("CONTENT_LENGTH") or 0)))


# How far a request's signed time may be from AWS's.
_MAX_SKEW = timedelta(minutes=15)
_SIGNED_AT = "%Y%m%dT%H%M%SZ"


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
        detail = f"<Code>AccessDenied</Code><Message>{escape(message)}</Message>"
        errors = (f"<Error><Key>{escape(key.text or '')}</Key>{detail}</Error>" for key in asked)
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
    code = "AccessDeniedException" if is_in_json(service, environ) else "AccessDenied"
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


def answer_cloudformation(request: Request, service: object) -> Response:
    """Call the service's method that the request names; return its result or error as XML."""
    values = request.values
    model = get_service_model("cloudformation")
    action = values.get("Action", "")
    if action not in model.operation_names:
        action = "DescribeStacks"
        result: Any = CloudFormationError(
            f"Could not find operation {values.get('Action')}", "InvalidAction"
        )
    else:
        result = _run_operation(model.operation_model(action), values, service)
    context = SerializationContext(request_id=str(uuid.uuid4()))
    serialized = QuerySerializer(model.operation_model(action), context).serialize(result)
    return Response(
        serialized["body"], status=serialized["status_code"], headers=serialized["headers"]
    )


def _run_operation(model: Any, values: MultiDict[str, str], service: object) -> Any:
    operation = getattr(service, xform_name(model.name), None)
    if operation is None:
        return CloudFormationError(
            f"The embedded AWS has no CloudFormation operation {model.name}", "InvalidAction"
        )
    parsed = QueryParser(model).parse({"values": values})  # type: ignore[typeddict-item]
    try:
        return operation(parsed) or {}
    except CloudFormationError as error:
        return error
