"""An S3 that misbehaves: the embedded AWS's, whose answers are late, wrong, truncated or lost."""

import logging
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.moto_api._internal.models import moto_api_backend
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from embedded_aws import Front

Start = Callable[..., Any]

_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
_ERRORS = {"InternalError": 500, "SlowDown": 503, "ConditionalRequestConflict": 409}
_SLOW_SECONDS = 0.2


class Misbehaving:
    """A WSGI application that forwards requests, some of them with a fault; `met` counts faults."""

    def __init__(self, app: Callable[[dict[str, Any], Start], Iterable[bytes]], seed: int) -> None:
        self.rate = 0.0
        self.met: Counter[str] = Counter()
        self._app = app
        self._rng = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        fault = self._draw(environ)
        if fault in _ERRORS:
            body = _ERROR.format(code=fault)
            return Response(body, _ERRORS[fault], mimetype="text/xml")(environ, start)
        if fault == "slow":
            time.sleep(_SLOW_SECONDS)
        if fault == "lost before":
            return self._hang_up(environ, start)
        if fault == "lost after":
            b"".join(self._app(environ, lambda *_: None))  # S3 has carried out the request
            return self._hang_up(environ, start)
        answer = self._app(environ, start)
        return self._cut(environ, answer) if fault == "cut body" else answer

    def _draw(self, environ: dict[str, Any]) -> str | None:
        with self._lock:
            if self._rng.random() >= self.rate:
                return None
            kinds = ["InternalError", "SlowDown", "slow", "lost before", "lost after"]
            if environ["REQUEST_METHOD"] == "GET":
                kinds += ["cut body", "cut body"]
            elif "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ:
                kinds += ["ConditionalRequestConflict"] * 2
            fault = self._rng.choice(kinds)
            self.met[fault] += 1
            return fault

    def _cut(self, environ: dict[str, Any], answer: Iterable[bytes]) -> Iterable[bytes]:
        data = b"".join(answer)
        yield data[: len(data) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)

    def _hang_up(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start("500 gone", [])
        return [b""]


@contextmanager
def misbehaving_s3(bucket: str, rate: float) -> Iterator[tuple[dict[str, str], Counter[str]]]:
    """Serve a new bucket; yield its clients' environment, and the faults as they are counted."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # connections break on purpose
    moto_api_backend.reset()
    app = Misbehaving(Front({}), seed=0)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    keys = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nothing"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=bucket)
    app.rate = rate
    variables = {name.upper(): value for name, value in keys.items()}
    regions = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_REGION": "us-east-1"}
    yield {"AWS_ENDPOINT_URL": endpoint, **variables, **regions}, app.met
    server.shutdown()
    server.server_close()
