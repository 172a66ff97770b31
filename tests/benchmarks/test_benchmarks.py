"""The benchmarks refuse nonsense; what they measure is logged, never asserted."""

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import s3
from benchmarks.__main__ import machine, parse_arguments
from training.store.protocol import PreconditionFailedError
from training.store.s3 import S3Store


def test_fails_a_benchmark_of_s3_of_no_rounds() -> None:
    with pytest.raises(ValueError, match="at least 1 round and 1 megabyte, got 0 and 1"):
        s3.measure(rounds=0, megabytes=1)


def test_the_sink_of_the_s3_benchmark_is_enough_for_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with s3.open_server("benchmarks.s3_sink") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store = S3Store("keep", "run")
        etag = store.put_if("head.json", b"one", None)
        with pytest.raises(PreconditionFailedError):
            store.put_if("head.json", b"two", None)
        assert store.put_if("head.json", b"two", etag) != etag
        data = bytes(range(256)) * 70_000
        upload = store.upload("object", len(data), 8 * 2**20, threading.Event())
        for number, start in enumerate(range(0, len(data), 8 * 2**20)):
            part = memoryview(data)[start : start + 8 * 2**20]
            upload.put(number, start, part, hashlib.sha256(part).digest())
        upload.finish()
        back = bytearray(100)
        store.read_into("object", len(data) - 100, memoryview(back))
        assert bytes(back) == data[-100:]
        assert store.sizes("") == {"head.json": 3, "object": len(data)}


@pytest.mark.slow  # nothing but the benchmark itself uses what it shows
def test_the_overhead_of_the_loop_is_measured_beside_bare_loops() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "loader",
        "--loop",
        "--rounds=1",
        "--width=16",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [row["loop"] for row in rows][-1] == "ours"
    for row in rows:
        assert 0 < row["outside the model's work, ms"] < row["median ms"]


def test_the_machine_is_named_without_its_host_name() -> None:
    assert machine().endswith("logical CPUs")


def test_every_benchmark_is_on_the_command_line() -> None:
    assert parse_arguments(["s3", "--rounds", "2", "--json"]).rounds == 2
    assert parse_arguments(["spot", "--traces", "x"]).starts == 25
