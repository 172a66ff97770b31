"""The forecast of a run on Spot: against the analytic results, its limits, and what it refuses."""

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit

from sizing.spot.forecast import SpotForecast, forecast
from sizing.spot.interruptions import interruptions
from sizing.spot.pattern import (
    SEEN,
    SEEN_IN_FLEETS,
    ZONES_SEEN,
    Pattern,
    unseen_zone,
)
from sizing.spot.simulation import SpotRun

from .conftest import POISSON

DAY = 86_400.0


def estimate(*, usd_per_hour: float = 0.0, **run: Any) -> SpotForecast:
    """The forecast of a run that saves every half an hour unless the test says otherwise."""
    return forecast(SpotRun(**{"interval_seconds": 1800.0, **run}), usd_per_hour=usd_per_hour)


def test_without_interruptions_a_run_takes_its_start_its_work_and_its_saves() -> None:
    seen = estimate(
        work_seconds=10_000,
        rate_per_hour=0,
        restart_seconds=300,
        checkpoint_seconds=5,
        interval_seconds=1_000,
        usd_per_hour=3.6,
    )
    # Nine saves: the end is committed anyway.
    assert seen.machine_hours_p50 * 3600 == pytest.approx(300 + 10_000 + 9 * 5)
    assert seen.hours_p90 == seen.hours_p50 == seen.machine_hours_p90
    assert seen.usd_p50 == pytest.approx(10.345)
    assert seen.interruptions == 0


@pytest.mark.parametrize(("rate", "checkpoint", "interval"), [(0.3, 15, 900), (1.0, 60, 600)])
def test_without_notices_goodput_is_the_analytic_one(
    rate: float, checkpoint: float, interval: float
) -> None:
    # Renewal reward: of a life L exp(mean M) with restart R, expect tau * sum_n P(L >= R + n p) of
    # training, p = tau + C; so goodput = tau * exp(-R / M) / (exp(p / M) - 1) / M.
    restart, mean = 240.0, 3600 / rate
    expected = interval * math.exp(-restart / mean) / math.expm1((interval + checkpoint) / mean)
    seen = estimate(
        work_seconds=60 * DAY,
        rate_per_hour=rate,
        restart_seconds=restart,
        checkpoint_seconds=checkpoint,
        interval_seconds=interval,
        notice_saves=0.0,
        pattern=POISSON,
    )
    assert seen.goodput == pytest.approx(expected / mean, rel=0.01)


def test_waiting_costs_hours_but_no_dollars() -> None:
    asked = {"work_seconds": 40 * 3600.0, "rate_per_hour": 0.3, "restart_seconds": 300.0}
    at_once = estimate(**asked, usd_per_hour=1.0, pattern=POISSON)
    waiting = estimate(**asked, usd_per_hour=1.0, wait_seconds=1800, pattern=POISSON)
    assert waiting.usd_p50 == at_once.usd_p50
    assert waiting.hours_p50 > at_once.hours_p50 + 4
    assert waiting.interruptions == pytest.approx(0.3 * waiting.machine_hours_p50, rel=0.1)


def test_many_interruptions_are_extended_from_fewer() -> None:
    asked: dict[str, Any] = {
        "rate_per_hour": 0.5, "restart_seconds": 300.0, "interval_seconds": 1800.0,
        "pattern": POISSON,
    }  # fmt: skip
    short = estimate(work_seconds=50 * 3600, **asked)
    long = estimate(work_seconds=500 * 3600, **asked)
    assert long.goodput == pytest.approx(short.goodput, rel=0.02)
    spread = long.hours_p90 / long.hours_p50 - 1
    assert spread == pytest.approx((short.hours_p90 / short.hours_p50 - 1) / math.sqrt(10), rel=0.3)


@settings(max_examples=60)
@given(
    work=st.floats(60, 30 * DAY),
    rate=st.floats(0, 2),
    restart=st.floats(0, 1200),
    checkpoint=st.floats(0, 120),
    fits=st.booleans(),
    pattern=st.sampled_from([POISSON, SEEN]),
)
def test_no_run_is_faster_than_its_work(
    work: float, rate: float, restart: float, checkpoint: float, fits: bool, pattern: Pattern
) -> None:
    seen = estimate(
        work_seconds=work,
        rate_per_hour=rate,
        restart_seconds=restart,
        checkpoint_seconds=checkpoint,
        notice_saves=0.95 * fits,
        wait_seconds=60,
        pattern=pattern,
    )
    assert seen.machine_hours_p50 * 3600 >= (work + restart) * (1 - 1e-9)
    assert seen.machine_hours_p90 >= seen.machine_hours_p50
    assert seen.hours_p90 >= seen.hours_p50 >= seen.machine_hours_p50 * (1 - 1e-9)
    assert 0 < seen.goodput <= 1 + 1e-9


def test_bursty_pools_that_nobody_knows_make_the_p90_longer_not_the_p50() -> None:
    asked: dict[str, Any] = {
        "work_seconds": DAY, "rate_per_hour": 0.3, "restart_seconds": 200.0, "wait_seconds": 7200.0
    }  # fmt: skip
    calm, seen = estimate(**asked, pattern=POISSON), estimate(**asked)
    assert seen.hours_p50 == pytest.approx(calm.hours_p50, rel=0.15)
    assert seen.hours_p90 > 2 * calm.hours_p90
    # What is paid for is known much better than when it will be done.
    assert seen.machine_hours_p90 < 1.2 * calm.machine_hours_p90


def test_a_run_may_have_to_wait_for_its_first_machine() -> None:
    asked: dict[str, Any] = {
        "work_seconds": 600.0, "rate_per_hour": 0.3, "restart_seconds": 0.0, "wait_seconds": 7200.0
    }  # fmt: skip
    assert estimate(**asked, pattern=POISSON).hours_p50 == pytest.approx(600 / 3600)
    # There is a machine 1 / (1 + 0.3 * 2) of the time.
    assert estimate(**asked).hours_p90 > 1
    assert estimate(**{**asked, "wait_seconds": 0.0}).hours_p90 < 0.25


def test_the_chance_of_no_machine_stands_beside_a_long_p90() -> None:
    short: dict[str, Any] = {"work_seconds": 240.0, "rate_per_hour": 0.39, "restart_seconds": 175.0}
    seen = estimate(**short, wait_seconds=1764.0)
    # Minutes of work and hours to wait: the p90 is that of the first machine, and says so.
    assert seen.hours_p50 < 0.2 < 1 < seen.hours_p90
    assert 0.1 < seen.no_machine_share < 0.4
    assert seen.first_wait_hours is not None
    assert 0.2 < seen.first_wait_hours < 3
    sure = estimate(**short, wait_seconds=0.0)
    assert (sure.no_machine_share, sure.first_wait_hours) == (0.0, None)


def test_zones_that_were_not_seen_differ_more_than_those_that_were() -> None:
    for share in (0.025, 0.1, 0.5, 0.9, 0.975):
        exact = float(stdtrit(ZONES_SEEN - 1, share)) * math.sqrt(1 + 1 / ZONES_SEEN)
        assert unseen_zone(share) == pytest.approx(exact, rel=0.01, abs=1e-9)


def test_the_p90_of_a_day_in_one_pool_is_of_the_order_that_25_zones_showed() -> None:
    # 127 h; the forecast said 411 h while it took the zones seen to be five.
    asked: dict[str, Any] = {
        "work_seconds": DAY, "restart_seconds": 180.0, "checkpoint_seconds": 1.0,
        "notice_saves": 1.0, "rate_per_hour": 0.39,
    }  # fmt: skip
    zone = estimate(**asked, wait_seconds=1.66 * 3600)
    assert 127 < zone.hours_p90 < 1.4 * 127
    # A fleet is better in the middle; at its worst, its pools are out together.
    fleet = estimate(**asked, wait_seconds=0.61 * 3600, pattern=SEEN_IN_FLEETS)
    assert fleet.hours_p50 < 0.8 * zone.hours_p50
    assert 0.8 * zone.hours_p90 < fleet.hours_p90 <= zone.hours_p90


def test_the_same_question_has_the_same_answer() -> None:
    asked = {"work_seconds": 9e4, "rate_per_hour": 0.2, "restart_seconds": 200.0}
    assert estimate(**asked) == estimate(**asked)


def test_a_thousand_forecasts_take_seconds() -> None:
    estimate(work_seconds=DAY, rate_per_hour=0.1, restart_seconds=200)
    began = time.process_time()
    for hours in range(1, 101):
        estimate(work_seconds=hours * 3600, rate_per_hour=0.124, restart_seconds=200)
    assert time.process_time() - began < 1.0


def test_fails_a_run_that_never_ends() -> None:
    with pytest.raises(ValueError, match=r"would never end on Spot: an interruption every 0\.01 h"):
        estimate(
            work_seconds=DAY, rate_per_hour=100, restart_seconds=600, notice_saves=0.0,
            interval_seconds=3600,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"work_seconds": 0.0}, "work_seconds must be more than 0, got 0"),
        ({"work_seconds": math.inf}, "work_seconds must be a finite number, got inf"),
        ({"checkpoint_seconds": math.inf}, "checkpoint_seconds must be a finite number, got inf"),
        ({"rate_per_hour": -1.0}, "rate_per_hour must be at least 0, got -1"),
        ({"restart_seconds": math.nan}, "restart_seconds must be at least 0, got nan"),
    ],
)
def test_fails_on_absurd_numbers(wrong: dict[str, float], says: str) -> None:
    asked = {"work_seconds": DAY, "rate_per_hour": 0.1, "restart_seconds": 100.0, **wrong}
    with pytest.raises(ValueError, match=says):
        estimate(**asked)


def test_interruption_figures_name_their_source() -> None:
    fleet, one = interruptions(), interruptions(pools=1)
    # Pools shorten waits, not lives: held-out fleets of one region lose what zones lose.
    assert fleet.rate_per_hour == one.rate_per_hour == 0.39
    assert fleet.wait_seconds < one.wait_seconds
    assert "skypilot-org/spot-traces" in fleet.source


def test_fails_for_no_pools() -> None:
    with pytest.raises(ValueError, match=r"at least one pool .* got 0"):
        interruptions(pools=0)


def test_without_interruptions_the_range_of_the_work_is_the_range_of_the_run() -> None:
    seen = estimate(
        work_seconds=10 * 3600,
        work_range=(8 * 3600, 16 * 3600),
        rate_per_hour=0,
        restart_seconds=0,
        usd_per_hour=1.0,
    )
    assert (seen.hours_p50, seen.hours_p90) == pytest.approx((10, 16))
    assert (seen.usd_p50, seen.usd_p90) == pytest.approx((10, 16))


def test_p90_holds_the_range_of_the_work_and_the_interruptions() -> None:
    asked: dict[str, Any] = {
        "work_seconds": 10 * 3600,
        "rate_per_hour": 0.39,
        "restart_seconds": 300.0,
        "wait_seconds": 1764.0,
        "usd_per_hour": 1.0,
    }
    certain, both = estimate(**asked), estimate(**asked, work_range=(8 * 3600, 16 * 3600))
    most = estimate(**{**asked, "work_seconds": 16 * 3600})
    assert both.usd_p90 > max(certain.usd_p90, 16)
    assert both.hours_p90 > max(certain.hours_p90, 16)
    # Both at their worst at once are rarer than one in ten.
    assert both.usd_p90 < most.usd_p90
    assert both.hours_p90 < most.hours_p90
    assert both.usd_of_p50_work == certain.usd_of_p50_work == certain.usd_p50
