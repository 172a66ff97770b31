"""An S3 that keeps what it gets and counts the bytes: the embedded AWS's, in a process of its own.

Prints its port; ends with its standard input. GET /-/received gives the bytes of all bodies so far.
"""

import sys
import threading
from collections.abc import Iterable
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

from rehearsal.aws.front import Front


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class _Counted:
    """Counts what is sent to the application behind it."""

    def __init__(self) -> None:
        self._front = Front({})
        self._received = 0
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/-/received":
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [str(self._received).encode()]
        with self._lock:
            self._received += int(environ.get("CONTENT_LENGTH") or 0)
        return self._front(environ, start_response)


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, _Counted(), threaded=True, request_handler=_Quiet)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
