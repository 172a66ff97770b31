"""The WSGI front of the embedded AWS: CloudFormation goes to our engine, all else to moto.

Each of moto's services handles one request at a time: moto is not thread-safe. It checks If-Match
and writes in two steps, and lists dictionaries that another request may be changing.
"""

import io
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from werkzeug.wrappers import Request

from cloudformation.wire import Operation, answer
from rehearsal.aws.denials import denial, is_from_instance, requested_action
from rehearsal.aws.moto_services import moto_services, signed_for


class Front:
    """The WSGI application."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self.operations = operations
        self.denied_actions: frozenset[str] = frozenset()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        service, _ = signed_for(environ)
        if service == "cloudformation":
            # Without a lock: an operation calls the other services, and some responses wait.
            return answer(Request(environ), self.operations)(environ, start_response)
        # The body is read before the lock is taken, so that a slow client blocks nobody.
        body = _body_of(environ)
        environ["wsgi.input"] = io.BytesIO(body)
        if self.denied_actions and is_from_instance(environ):
            action = requested_action(service, environ, body)
            if action in self.denied_actions:
                return denial(service, action)(environ, start_response)
        with self.alone_in(service):
            response = moto_services(environ)
        return response(environ, start_response)

    def alone_in(self, service: str) -> threading.Lock:
        """Return the lock that keeps the service's other requests waiting."""
        return self._locks[service]


def _body_of(environ: Mapping[str, Any]) -> bytes:
    stream = environ["wsgi.input"]
    if environ.get("wsgi.input_terminated"):  # chunked: the server finds the end
        return bytes(stream.read())
    return bytes(stream.read(int(environ.get("CONTENT_LENGTH") or 0)))
