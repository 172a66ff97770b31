"""The simulator: no second is lost or counted twice, and it agrees with what can be calculated."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizing.spot.forecast import forecast
from sizing.spot.interruptions import SpotLife
from sizing.spot.replay import Replay, ReplayJob
from sizing.spot.simulation import SpotRun
from tests.sizing.sample_lives import poisson_lives

from .conftest import POISSON

HOUR = 3600.0


def test_without_interruptions_a_run_takes_its_ideal_time() -> None:
    seen = Replay(
        lives=[SpotLife(start=0, end=1e9)],
        job=ReplayJob(work=10 * HOUR, restart=200, checkpoint=10, interval=HOUR, notice_idle=120),
        horizon=1e9,
        has_notice=[True],
    ).run()
    assert seen.is_done
    assert seen.seconds == seen.spot == 10 * HOUR + 200 + 9 * 10
    assert (seen.useful, seen.losses) == (10 * HOUR, 0)


@pytest.mark.parametrize(("warned", "useful"), [(True, 2680), (False, 2000)])
def test_a_notice_turns_lost_training_into_lost_notice(warned: bool, useful: float) -> None:
    # 200 s of restart, then 1000 s + 20 s of saving, 1000 s + 20 s, and 800 s without a save.
    seen = Replay(
        lives=[SpotLife(start=0, end=200 + 2 * 1020 + 800)],
        job=ReplayJob(work=1e9, restart=200, checkpoint=20, interval=1000, notice_idle=120),
        horizon=5000,
        has_notice=[warned],
    ).run()
    assert (seen.useful, seen.spot, seen.seconds) == (useful, 3040, 5000)


seconds = st.floats(1, 20_000)
worlds = st.lists(st.tuples(seconds, st.one_of(st.just(0.0), seconds), st.booleans()), max_size=25)


@settings(max_examples=100)
@given(
    world=worlds,
    restart=st.floats(0, 900),
    checkpoint=st.floats(0, 90),
    interval=st.floats(60, 7200),
    notice_idle=st.one_of(st.none(), st.floats(0, 120)),
)
def test_a_job_does_its_work_and_pays_for_no_second_without_a_machine(
    world: list[tuple[float, float, bool]],
    restart: float,
    checkpoint: float,
    interval: float,
    notice_idle: float | None,
) -> None:
    now, lives = 0.0, []
    for up, down, _ in world:
        lives.append(SpotLife(start=now, end=now + up))
        now += up + down
    work, horizon = 6 * HOUR, 40 * HOUR
    seen = Replay(
        lives=lives,
        job=ReplayJob(
            work=work,
            restart=restart,
            checkpoint=checkpoint,
            interval=interval,
            notice_idle=notice_idle,
        ),
        horizon=horizon,
        has_notice=[warned for _, _, warned in world],
    ).run()
    there = sum(max(0.0, min(life.end, seen.seconds) - life.start) for life in lives)
    assert seen.useful - 1e-6 <= seen.spot == pytest.approx(there)
    if seen.is_done:
        assert seen.useful == pytest.approx(work)
        assert seen.seconds >= work + restart - 1e-6
    else:
        assert seen.seconds == pytest.approx(horizon, rel=1e-6)


@pytest.mark.parametrize("notice_arrives", [0.0, 1.0])
def test_poisson_lives_give_the_analytic_goodput(notice_arrives: float) -> None:
    mean, restart, checkpoint, interval = 2 * HOUR, 240.0, 20.0, 900.0
    lives = poisson_lives(seed=5, mean=mean, wait=600, total=40_000 * HOUR)
    seen = Replay(
        lives=lives,
        job=ReplayJob(
            work=1e12,
            restart=restart,
            checkpoint=checkpoint,
            interval=interval,
            notice_idle=120,
        ),
        horizon=40_000 * HOUR,
        has_notice=[notice_arrives == 1.0] * len(lives),
    ).run()
    period = interval + checkpoint
    if notice_arrives:
        # The saves between cost their share; the rest of a last interval is kept.
        kept = math.exp(-(restart + 120) / mean)
        # Sum over whole periods, plus the part of a last one (capped at the interval).
        last = (1 - math.exp(-interval / mean)) / -math.expm1(-period / mean)
        expected = kept * last
    else:
        expected = interval * math.exp(-restart / mean) / math.expm1(period / mean) / mean
    goodput = seen.useful / seen.spot
    assert goodput == pytest.approx(expected, rel=0.01)
    run = SpotRun(
        work_seconds=2000 * HOUR,
        rate_per_hour=HOUR / mean,
        restart_seconds=restart,
        checkpoint_seconds=checkpoint,
        interval_seconds=interval,
        notice_saves=notice_arrives,
        pattern=POISSON,
    )
    assert forecast(run).goodput == pytest.approx(goodput, rel=0.015)
