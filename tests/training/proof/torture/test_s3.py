"""The torture against a real HTTP server that misbehaves as S3 may."""

import json
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from benchmarks.kills.misbehaving_s3 import Misbehaving
from rehearsal.aws.front import Front
from tests.training.forked import command


class Quiet(WSGIRequestHandler):
    """Connections that break are what is wanted here."""

    def log(self, kind: str, message: str, *arguments: object) -> None:
        pass

    def connection_dropped(self, error: BaseException, environ: object = None) -> None:
        pass


@pytest.fixture
def misbehaving() -> Iterator[tuple[Misbehaving, str]]:
    app = Misbehaving(Front({}), seed=4)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield app, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_kills_and_an_s3_that_misbehaves_change_no_bit(
    misbehaving: tuple[Misbehaving, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app, endpoint = misbehaving
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    bucket = f"bucket-{secrets.token_hex(6)}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    app.rate = 0.04
    where = [f"--run-uri=s3://{bucket}/runs", f"--out={tmp_path / 'out'}"]
    short = ["--kills=4", "--seed=7", "--override=epochs=3", "--lease-ttl-seconds=1.5"]
    done = command(["torture", *short, *where, "--json"])
    assert done.out, done.err
    result = json.loads(done.out)
    assert result["differences"] == [], done.err
    assert done.code == 0
    assert result["kills"] >= 4
    # Which of the five depends on how far each attempt comes before it is killed.
    assert len(app.met) >= 3, app.met
