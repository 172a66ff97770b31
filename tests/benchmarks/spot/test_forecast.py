"""Forecasts beside traces left out: what is tested has no part in what is forecast."""

import json
from pathlib import Path
from statistics import geometric_mean

import pytest

from benchmarks.spot import forecast
from sizing.spot.traces import load_trace, statistics


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
