"""The WSGI front of the embedded AWS: CloudFormation goes to our engine, all else to moto.

Each of moto's services handles one request at a time: moto is not thread-safe. It checks If-Match
and writes in two steps, and lists dictionaries that another request may be changing.
"""

import io
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Never

from werkzeug.wrappers import Request

from cloudformation.wire import answer
from rehearsal.aws.moto_services import moto_services, signed_for
from rehearsal.aws.refusals import is_from_instance, refusal, requested, skew_refusal
from rehearsal.faults import GUARD, MACHINES, FaultInjector

# What a deployed function calls itself to AWS, by the SDK's own variable AWS_SDK_UA_APP_ID.
FUNCTION = "deployed-function"


class Front:
    """The WSGI application."""

    def __init__(self, cloudformation: object) -> None:
        self.cloudformation = cloudformation
        self.faults = FaultInjector()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        service, _ = signed_for(environ)
        if service == "cloudformation":
            # Without a lock: an operation calls the other services, and some responses wait.
            return answer(Request(environ), self.cloudformation)(environ, start_response)
        # The body is read before the lock is taken, so that a slow client blocks nobody.
        body = _body_of(environ)
        environ["wsgi.input"] = io.BytesIO(body)
        fault = None
        is_guard = f"app/{FUNCTION}" in environ.get("HTTP_USER_AGENT", "")
        if is_guard or is_from_instance(environ):
            action, key = requested(service, environ, body)
            now = datetime.now(UTC) + timedelta(seconds=self.faults.clock_ahead_seconds)
            if (refused := skew_refusal(service, environ, now)) is not None:
                return refused(environ, start_response)
            fault = self.faults.meet(action, key, GUARD if is_guard else MACHINES)
            if fault is not None and fault.status:
                return refusal(service, action, fault.status)(environ, start_response)
        with self.alone_in(service):
            response = moto_services(environ)
        if fault is not None and fault.loses_answer:
            reset(environ["werkzeug.socket"])
        return response(environ, start_response)

    def alone_in(self, service: str) -> threading.Lock:
        """Return the lock that keeps the service's other requests waiting."""
        return self._locks[service]


def reset(connection: socket.socket) -> Never:
    """Reset a connection in place of an answer; the server takes it for a client that hung up."""
    # Closed without waiting, which TCP does by a reset; and nothing more is read from it.
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
            # A machine that was killed in mid-request; the server passes over clients that hang up.
            raise ConnectionResetError(str(error)) from error
    return bytes(stream.read(int(environ.get("CONTENT_LENGTH") or 0)))
