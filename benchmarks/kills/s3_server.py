"""An S3 that misbehaves: the embedded AWS's, whose answers are late, wrong, truncated or lost.

It prints its port and ends with its standard input. GET /-/faults returns the number of faults.
"""

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from werkzeug.serving import WSGIRequestHandler, make_server

from benchmarks import REPOSITORY
from benchmarks.kills import RATE
from benchmarks.kills.misbehaving_s3 import Misbehaving
from embedded_aws.front import Front

BUCKET = "kills"


@contextmanager
def open_server() -> Iterator[dict[str, str]]:
    """Run this server in a process of its own; yield the environment of its clients."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kills.s3_server"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{process.stdout.readline().strip()}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
        }
        process.stdin.close()


class _Quiet(WSGIRequestHandler):
    """A handler that logs nothing, as broken connections are intended here."""

    def log(self, kind: str, message: str, *arguments: object) -> None:
        pass

    def connection_dropped(self, error: BaseException, environ: object = None) -> None:
        pass


class _Counting(Misbehaving):
    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/-/faults":
            return super().__call__(environ, start)
        start("200 OK", [("Content-Type", "text/plain")])
        return [str(sum(self.met.values())).encode()]


if __name__ == "__main__":
    app = _Counting(Front({}), seed=0)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    keys = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nothing"}
    endpoint = f"http://127.0.0.1:{server.server_port}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(
        Bucket=BUCKET
    )
    app.rate = RATE
    print(server.server_port, flush=True)
    sys.stdin.read()
