"""Traces: read as they are, counted, and refused in one sentence."""

from pathlib import Path

import pytest

from sizing.spot.interruptions import SpotLife, interruptions_of, load_trace

from .conftest import WriteTrace


def test_a_life_is_a_run_of_available_ticks(write_trace: WriteTrace) -> None:
    trace = load_trace(write_trace([0, 1, 1, 0, 2, 0], gap=30))
    assert trace.lives == (SpotLife(start=30, end=90), SpotLife(start=120, end=150))
    assert trace.seconds == 180


def test_a_machine_that_outlives_the_trace_was_not_lost(write_trace: WriteTrace) -> None:
    seen = interruptions_of(load_trace(write_trace([1, 0, 0, 1], gap=3600)))
    assert (seen.rate_per_hour, seen.wait_seconds) == (0.5, 2 * 3600)
    assert seen.source == "trace: 1 losses in 2 machine hours"


def test_public_traces_are_named_by_zone_and_day(write_trace: WriteTrace) -> None:
    name = "preemption_1-node_aws-04-22-2023_us-east-1c_v100_1.json"
    assert load_trace(write_trace([1], name=name)).name == "us-east-1c 04-22"


@pytest.mark.parametrize(
    ("data", "gap", "says"),
    [
        ([], 60, "data must be a list with at least one tick"),
        ("1010", 60, "data must be a list"),
        ([1, None], 60, "tick 1 must be a number of machines, got None"),
        ([1, -1], 60, "tick 1 must be a number of machines, got -1"),
        ([1], 0, "gap_seconds must be above 0 and below 1e6, got 0"),
        ([1], "60", "gap_seconds must be above 0 and below 1e6, got '60'"),
    ],
)
def test_fails_on_a_trace_that_makes_no_sense(
    data: object, gap: object, says: str, write_trace: WriteTrace
) -> None:
    with pytest.raises(ValueError, match=says):
        load_trace(write_trace(data, gap=gap))


def test_fails_on_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace .* does not exist"):
        load_trace(tmp_path / "missing.json")
    (tmp_path / "x.json").write_text("[1, 2")
    with pytest.raises(ValueError, match=r"x\.json is not a trace: use JSON"):
        load_trace(tmp_path / "x.json")


def test_fails_on_a_trace_without_a_machine(write_trace: WriteTrace) -> None:
    with pytest.raises(ValueError, match="has no machine at any time"):
        load_trace(write_trace([0, 0, 0]))
