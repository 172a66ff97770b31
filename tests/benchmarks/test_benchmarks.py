"""The benchmarks refuse nonsense; what they measure is logged, never asserted."""

import json
import subprocess
import sys

import pytest

from benchmarks.__main__ import machine, parse_arguments


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
    assert parse_arguments(["checkpoint", "--rounds", "2", "--json"]).rounds == 2
    assert parse_arguments(["spot", "--traces", "x"]).starts == 25
