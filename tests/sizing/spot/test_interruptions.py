"""Interruptions: traces are read or refused, and own history is blended with what they say."""

import math
import random
from pathlib import Path

import pytest

from sizing.fallback.pools import PoolHistory, PoolRecord
from sizing.spot.interruptions import blend, interruptions, learned, read_spot_counts

from .conftest import WriteTrace


def test_a_trace_is_its_counts_and_the_seconds_between_them(write_trace: WriteTrace) -> None:
    assert read_spot_counts(write_trace([0, 1, 2.0], gap=30)) == (30, [0, 1, 2])


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
        read_spot_counts(write_trace(data, gap=gap))


def test_fails_on_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace .* does not exist"):
        read_spot_counts(tmp_path / "missing.json")
    (tmp_path / "x.json").write_text("[1, 2")
    with pytest.raises(ValueError, match=r"x\.json is not a trace: use JSON"):
        read_spot_counts(tmp_path / "x.json")


WORLDS = [(0.15, 0.8), (0.39, 1.66), (1.4, 4.0)]


def _course(seed: int, *, rate: float, wait: float, days: float) -> PoolRecord:
    """A pool as the model has them: bursty lives and waits."""
    luck, now, last, seen = random.Random(seed), 0.0, days * 24, PoolRecord()
    while now < last:
        end = now + luck.weibullvariate(1 / rate / math.gamma(1 + 1 / 0.55), 0.55)
        lived = min(end, last)
        seen += PoolRecord(at=lived * 3600, up_hours=lived - now, losses=float(end < last))
        now = end + luck.weibullvariate(wait / 2, 0.5)
        if now < last:
            seen += PoolRecord(at=now * 3600, wait_hours=now - end, waits=1.0)
    return seen.as_of(last * 3600)


@pytest.mark.parametrize(("rate", "wait"), WORLDS)
def test_the_more_history_there_is_the_nearer_and_the_surer_the_plan_is(
    rate: float, wait: float
) -> None:
    prior = interruptions(pools=1)
    short, long = (blend(prior, _course(7, rate=rate, wait=wait, days=days)) for days in (1, 20))
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
    tmp_path: Path,
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
