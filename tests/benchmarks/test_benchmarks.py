"""The benchmarks refuse nonsense; what they measure is logged, never asserted."""

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from statistics import geometric_mean

import pytest

from benchmarks import forecast, s3, spot
from benchmarks.__main__ import machine, parse_arguments
from sizing.spot.traces import load_trace, statistics
from training.store.protocol import PreconditionFailedError
from training.store.s3 import S3Store


def test_fails_a_benchmark_of_s3_of_no_rounds() -> None:
    with pytest.raises(ValueError, match="at least 1 round and 1 megabyte, got 0 and 1"):
        s3.measure(rounds=0, megabytes=1)


def test_the_sink_of_the_s3_benchmark_is_enough_for_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with s3.open_sink() as environment:
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
    command = [sys.executable, "-m", "benchmarks", "overhead", "--rounds=1", "--width=16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [row["loop"] for row in rows][-1] == "ours"
    for row in rows:
        assert 0 < row["outside the model's work, ms"] < row["median ms"]


def test_the_machine_is_named_without_its_host_name() -> None:
    assert machine().endswith("logical CPUs")


def test_every_benchmark_is_on_the_command_line() -> None:
    assert parse_arguments(["s3", "--rounds", "2", "--json"]).rounds == 2
    assert parse_arguments(["spot", "--traces", "x"]).starts == 100


def test_the_spot_benchmark_counts_what_is_planned_with(tmp_path: Path) -> None:
    for name, ticks in (("a", [1, 0, 1, 1]), ("b", [0, 1, 1, 0])):
        trace = {"metadata": {"gap_seconds": 3600}, "data": ticks * 30}
        (tmp_path / f"{name}.json").write_text(json.dumps(trace))
    rows = {row["what"]: row for row in spot.count(tmp_path)}
    assert rows["a"]["losses"] == 30
    assert rows["typical zone (geometric mean)"]["machine hours"] == 150
    # Together there is a machine at any hour.
    assert rows["fleet of 2 pools"]["hours to the next"] == 0
    assert rows["planned with, one pool"]["losses per machine hour"] > 0


def test_fails_a_benchmark_without_traces_and_says_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"skipped\. Get the .json files of skypilot-org"):
        spot.measure(folder=tmp_path / "none", num_starts=1)


def test_the_forecast_benchmark_leaves_out_what_it_tests(tmp_path: Path) -> None:
    lives = ((8, 2), (30, 4), (5, 9), (60, 3))
    for number, (there, gone) in enumerate(lives):
        data = ([1] * there + [0] * gone) * (600 // (there + gone))
        # Two of each time: the first two are a fleet of their own.
        gap = 300 if number < 2 else 600
        trace = {"metadata": {"gap_seconds": gap}, "data": (data + [0] * 600)[:600]}
        (tmp_path / f"{number}.json").write_text(json.dumps(trace))
    paths = sorted(tmp_path.glob("*.json"))
    zones = forecast.zones_left_out([paths[:2], paths[2:]])
    rates = [statistics([load_trace(path)]).rate_per_hour for path in paths]
    for left_out, rate in zip(zones, rates, strict=True):
        others = [other for other in rates if other != rate]
        assert left_out.rate_per_hour == pytest.approx(geometric_mean(others))
    fleets = forecast.fleets_left_out([paths[:2], paths[2:]])
    assert fleets[0].rate_per_hour == pytest.approx(geometric_mean(rates[2:]))
    assert len(fleets) == 2


def test_fails_to_leave_one_of_three_traces_out(tmp_path: Path) -> None:
    for name in "abc":
        trace = {"metadata": {"gap_seconds": 300}, "data": [1, 0, 1, 1] * 9}
        (tmp_path / f"{name}.json").write_text(json.dumps(trace))
    with pytest.raises(ValueError, match="3 traces are too few to leave one out"):
        forecast.measure(folder=tmp_path)
