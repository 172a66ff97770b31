"""Traces: read as they are, counted, and refused in one sentence."""

import math
import random
from pathlib import Path

import pytest

from sizing.fallback.pools import PoolHistory, PoolRecord
from sizing.spot.interruptions import (
    SpotLife,
    Trace,
    blend,
    interruptions,
    interruptions_of,
    learned,
    load_trace,
    record_of,
)

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


WORLDS = [(0.15, 0.8), (0.39, 1.66), (1.4, 4.0)]


def _course(seed: int, *, rate: float, wait: float, days: float) -> Trace:
    """A pool as the model has them: bursty lives and waits."""
    luck, now, lives = random.Random(seed), 0.0, list[SpotLife]()
    while now < days * 24:
        end = now + luck.weibullvariate(1 / rate / math.gamma(1 + 1 / 0.55), 0.55)
        lives.append(SpotLife(start=now * 3600, end=min(end, days * 24) * 3600))
        now = end + luck.weibullvariate(wait / 2, 0.5)
    return Trace(name="drawn", seconds=days * 86_400, lives=tuple(lives))


@pytest.mark.parametrize(("rate", "wait"), WORLDS)
def test_the_more_history_there_is_the_nearer_and_the_surer_the_plan_is(
    rate: float, wait: float
) -> None:
    prior = interruptions(pools=1)
    short, long = (
        blend(prior, record_of(_course(7, rate=rate, wait=wait, days=days))) for days in (1, 20)
    )
    assert long.pattern.rate_spread < short.pattern.rate_spread < prior.pattern.rate_spread
    assert long.pattern.wait_spread < prior.pattern.wait_spread
    if rate != prior.rate_per_hour:
        off = [abs(math.log(each.rate_per_hour / rate)) for each in (long, prior)]
        assert off[0] < off[1]
    assert long.saving_rate == min(long.rate_per_hour, prior.rate_per_hour)


def test_a_history_of_nothing_changes_nothing() -> None:
    prior = interruptions(pools=2)
    empty = blend(prior, PoolRecord())
    assert empty.rate_per_hour == pytest.approx(prior.rate_per_hour)
    assert empty.wait_seconds == pytest.approx(prior.wait_seconds)


def test_own_runs_of_a_size_and_zone_count_and_what_is_missing_or_damaged_is_said(
    tmp_path: Path, write_trace: WriteTrace
) -> None:
    prior, path = interruptions(pools=2), tmp_path / "spot.json"
    calm = PoolRecord(up_hours=200, losses=2, wait_hours=1, waits=3)
    wild = PoolRecord(up_hours=10, losses=20, wait_hours=30, waits=20)
    pools = {"g5.xlarge use1-az1": calm, "g5.xlarge use1-az2": wild}
    path.write_text(PoolHistory({"run": pools}).to_json())

    def rate(size: str, zone: str | None = None) -> float:
        return learned(prior, path, size, zone).rate_per_hour

    assert rate("g5.xlarge", "use1-az1") < prior.rate_per_hour < rate("g5.xlarge", "use1-az2")
    assert rate("g5.xlarge", "use1-az1") < rate("g5.xlarge") < rate("g5.xlarge", "use1-az2")
    # The trainer's interval follows the calm pools, and not the wild ones.
    hours = [learned(prior, path, "g5.xlarge", zone).learned_life_hours
             for zone in ("use1-az1", "use1-az2")]  # fmt: skip
    assert hours[0] and hours[0] > 1 / prior.rate_per_hour
    assert hours[1] == pytest.approx(1 / prior.rate_per_hour)
    assert prior.learned_life_hours is None
    for history, why in (
        (path, "the account's runs had no g5.2xlarge "),
        (tmp_path / "none.json", "there is no Spot history"),
        (Path(__file__), "is not a history of Spot pools"),
    ):
        found = learned(prior, history, "g5.2xlarge", None)
        assert found.rate_per_hour == prior.rate_per_hour
        assert found.pattern == prior.pattern
        assert why in found.source
    trace = write_trace([1, 0] * 50, gap=600)
    assert learned(prior, trace, "g5.2xlarge", None).rate_per_hour > prior.rate_per_hour
