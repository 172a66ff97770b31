"""The WSGI front of the embedded AWS: IAM first, CloudFormation to our engine, the rest to moto.

Each of moto's services handles one request at a time, as moto is not thread-safe: it checks
If-Match and writes in two steps, and lists dictionaries that another request may be changing.
"""

import io
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Never

from werkzeug.wrappers import Request, Response

from embedded_aws.checks import find_mistake
from embedded_aws.cloudformation.wire import answer
from embedded_aws.faults import GUARD, JOB_SERVICES, MACHINES, SUBMITTERS, Fault, FaultInjector
from embedded_aws.iam.access import AccessControl
from embedded_aws.iam.requests import asked
from embedded_aws.iam.sessions import FUNCTION_KEY, NOBODY
from embedded_aws.moto_services import moto_services, signed_for
from embedded_aws.refusals import answer_error, denial, is_from_instance, refusal, skew_refusal
from embedded_aws.service_jobs import ServiceJobs


class Front:
    """The WSGI application."""

    def __init__(self, cloudformation: object, access: AccessControl | None = None) -> None:
        """Without `access`, everybody may do everything."""
        self.cloudformation = cloudformation
        self.access = access
        self.jobs: ServiceJobs | None = None
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
            if refused is None:
                mistake = find_mistake(service, environ, body, self.access.account)
                refused = mistake and answer_error(service, environ, *mistake)
        if refused is not None:
            return refused(environ, start_response)
        if self.jobs is not None and (own := self.jobs.answer(service, environ, body)) is not None:
            return own(environ, start_response)
        if service == "cloudformation":
            # Without a lock: an operation calls the other services, and some responses wait.
            return answer(Request(environ), self.cloudformation)(environ, start_response)
        with self.alone_in(service):
            response = moto_services(environ)
        if response.status_code == 404 and service == "s3" and self.access is not None:
            denied = self.access.hides(environ, body)
            response = denial(service, environ, denied) if denied else response
        if fault is not None and fault.loses_answer:
            reset(environ["werkzeug.socket"])
        return response(environ, start_response)

    def _faulty(
        self, service: str, environ: dict[str, Any], body: bytes
    ) -> tuple[Fault | None, Response | None]:
        """Return the fault that hits a request, and the refusal if it is refused."""
        caller = self.access.sessions.find(environ, body) if self.access else NOBODY
        of = GUARD if FUNCTION_KEY in caller.keys else MACHINES
        if of == MACHINES and not is_from_instance(environ, caller):
            if service not in JOB_SERVICES:
                return None, None
            of = SUBMITTERS
        now = datetime.now(UTC) + timedelta(seconds=self.faults.clock_ahead_seconds)
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
