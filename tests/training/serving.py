"""S3 at an HTTP server of this process."""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from werkzeug.serving import WSGIRequestHandler, make_server


class _Quiet(WSGIRequestHandler):
    """Connections that break may be what is wanted."""

    def log(self, kind: str, message: str, *arguments: object) -> None:
        pass

    def connection_dropped(self, error: BaseException, environ: object = None) -> None:
        pass


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The application at its endpoint."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


# An account's key, by its endpoint; where none is here, each key is right.
KEYS: dict[str, str] = {}


def new_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a bucket there, which clients reach by their environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, KEYS.get(endpoint, "testing"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    bucket = f"bucket-{secrets.token_hex(6)}"
    boto3.Session().client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}"
