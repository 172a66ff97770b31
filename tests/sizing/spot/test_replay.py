"""The simulator: no second is lost or counted twice, and it agrees with what can be calculated."""

import math

import pytest

from sizing.spot.forecast import forecast
from sizing.spot.pattern import POISSON
from sizing.spot.replay import Replay, ReplayJob, Saving
from sizing.spot.simulation import SpotRun
from sizing.spot.traces import SpotLife
from tests.sizing.sample_lives import poisson_lives

HOUR = 3600.0


def test_without_interruptions_a_run_takes_its_ideal_time() -> None:
    seen = Replay(
        lives=[SpotLife(start=0, end=1e9)],
        job=ReplayJob(work=10 * HOUR, restart=200, checkpoint=10),
        saving=Saving(interval=HOUR, notice_idle=120),
        horizon=1e9,
    ).run()
    assert seen.is_done
    assert seen.seconds == seen.spot == 10 * HOUR + 200 + 9 * 10
    assert (seen.lost, seen.seconds - seen.spot, seen.losses) == (0, 0, 0)


@pytest.mark.parametrize(("warned", "lost", "notice"), [(True, 0, 120), (False, 800, 0)])
def test_a_notice_turns_lost_training_into_lost_notice(
    warned: bool, lost: float, notice: float
) -> None:
    # 200 s of restart, then 1000 s + 20 s of saving, 1000 s + 20 s, and 800 s without a save.
    seen = Replay(
        lives=[SpotLife(start=0, end=200 + 2 * 1020 + 800)],
        job=ReplayJob(restart=200, checkpoint=20),
        saving=Saving(interval=1000, notice_idle=120),
        horizon=5000,
        has_notice=[warned],
    ).run()
    assert (seen.lost, seen.notice) == (lost, notice)
    assert seen.useful == (2000 if not warned else 2680)
    assert (seen.saving, seen.restart, seen.seconds - seen.spot) == (40, 200, 5000 - 3040)


@pytest.mark.parametrize("notice_arrives", [0.0, 1.0])
def test_poisson_lives_give_the_analytic_goodput(notice_arrives: float) -> None:
    mean, restart, checkpoint, interval = 2 * HOUR, 240.0, 20.0, 900.0
    lives = poisson_lives(seed=5, mean=mean, wait=600, total=40_000 * HOUR)
    seen = Replay(
        lives=lives,
        job=ReplayJob(restart=restart, checkpoint=checkpoint),
        saving=Saving(interval=interval, notice_idle=120),
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
    assert seen.goodput == pytest.approx(expected, rel=0.01)
    run = SpotRun(
        work_seconds=2000 * HOUR,
        rate_per_hour=HOUR / mean,
        restart_seconds=restart,
        checkpoint_seconds=checkpoint,
        interval_seconds=interval,
        notice_saves=notice_arrives,
        pattern=POISSON,
    )
    assert forecast(run).goodput == pytest.approx(seen.goodput, rel=0.015)
