"""The torture against a real HTTP server that misbehaves as S3 may."""

import json
from pathlib import Path

import pytest

from benchmarks.kills.s3 import Misbehaving
from embedded_aws.front import Front
from tests.training.forked import command
from tests.training.serving import new_bucket, served


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
