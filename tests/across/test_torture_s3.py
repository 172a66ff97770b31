"""The torture against a real HTTP server that misbehaves as S3 may."""

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from werkzeug.wrappers import Response

from embedded_aws.front import Front
from tests.training.forked import command
from tests.training.serving import new_bucket, served

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


def test_kills_and_an_s3_that_misbehaves_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = Misbehaving(Front({}), seed=4)
    with served(app) as endpoint:
        bucket_uri = new_bucket(endpoint, monkeypatch)
        app.rate = 0.04
        where = [f"--run-uri={bucket_uri}/runs", f"--out={tmp_path / 'out'}"]
        # Of a run that ranks share each of them writes there.
        shared = ["--recipe=sharded", "--num-processes=2", "--lease-ttl-seconds=1.5"]
        short = ["--kills=4", "--seed=7", "--override=epochs=3", *shared]
        done = command(["torture", *short, *where, "--json"])
    assert done.out, done.err
    result = json.loads(done.out)
    assert result["differences"] == [], done.err
    assert done.code == 0
    assert result["kills"] >= 4
    # Which of the five depends on how far each attempt comes before it is killed.
    assert len(app.met) >= 3, app.met
