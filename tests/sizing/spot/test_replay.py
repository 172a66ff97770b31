"""The simulator: no second is lost or counted twice, and it agrees with what can be calculated."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizing.spot import POISSON, estimate
from sizing.spot.lookahead import Lookahead
from sizing.spot.oracle import best_goodput, least_usd
from sizing.spot.policies import Greedy, OnDemandOnly, SpotOnly, UniformProgress
from sizing.spot.replay import Job, Ledger, Placement, Saving, replay
from sizing.spot.traces import Life

from .conftest import poisson_lives

HOUR = 3600.0
PRICES = {"spot_per_hour": 0.4, "on_demand_per_hour": 1.0}


def placements() -> list[Placement]:
    return [SpotOnly(), OnDemandOnly(), Greedy(), UniformProgress(), Lookahead(**PRICES)]


def columns(ledger: Ledger) -> list[float]:
    return [
        ledger.useful, ledger.lost, ledger.saving, ledger.restart, ledger.notice, ledger.waiting
    ]  # fmt: skip


seconds = st.floats(1, 20_000)
worlds = st.lists(st.tuples(seconds, st.one_of(st.just(0.0), seconds), st.booleans()), max_size=25)


def lives_of(world: list[tuple[float, float, bool]]) -> list[Life]:
    now, lives = 0.0, []
    for up, down, _ in world:
        lives.append(Life(start=now, end=now + up))
        now += up + down
    return lives


@settings(max_examples=150, deadline=None)
@given(
    world=worlds,
    restart=st.floats(0, 900),
    checkpoint=st.floats(0, 90),
    interval=st.floats(60, 7200),
    notice_idle=st.one_of(st.none(), st.floats(0, 120)),
    slack=st.floats(1.05, 4),
    which=st.integers(0, 4),
)
def test_every_second_is_in_one_column_and_the_oracle_is_never_beaten(
    world: list[tuple[float, float, bool]],
    restart: float,
    checkpoint: float,
    interval: float,
    notice_idle: float | None,
    slack: float,
    which: int,
) -> None:
    lives, work = lives_of(world), 6 * HOUR
    job = Job(
        work=work, deadline=slack * work + 2 * restart, restart=restart, checkpoint=checkpoint
    )
    horizon = 4 * job.deadline
    seen = replay(
        lives,
        job=job,
        saving=Saving(interval=interval, notice_idle=notice_idle),
        placement=placements()[which],
        horizon=horizon,
        has_notice=[warned for _, _, warned in world],
    )
    assert min(columns(seen)) >= -1e-6
    assert seen.spot + seen.on_demand + seen.waiting == pytest.approx(seen.wall)
    if seen.is_done:
        assert seen.useful == pytest.approx(work)
        assert seen.wall >= work + restart - 1e-6
    else:
        assert seen.wall == pytest.approx(horizon, rel=1e-6)
    if seen.is_done and seen.wall <= job.deadline:
        bound = least_usd(lives, work=work, deadline=job.deadline, restart=restart, **PRICES)
        assert seen.usd(**PRICES) >= bound - 1e-6


@settings(max_examples=80, deadline=None)
@given(world=worlds, restart=st.floats(0, 900), interval=st.floats(60, 7200))
def test_no_saving_beats_the_oracles_goodput(
    world: list[tuple[float, float, bool]], restart: float, interval: float
) -> None:
    lives = lives_of(world)
    seen = replay(
        lives,
        job=Job(restart=restart, checkpoint=1.0),
        saving=Saving(interval=interval, notice_idle=0.0),
        placement=SpotOnly(),
        horizon=lives[-1].end if lives else 1.0,
    )
    assert seen.goodput <= best_goodput(lives, restart=restart) + 1e-9


def test_without_interruptions_a_run_takes_its_ideal_time() -> None:
    seen = replay(
        [Life(start=0, end=1e9)],
        job=Job(work=10 * HOUR, restart=200, checkpoint=10),
        saving=Saving(interval=HOUR, notice_idle=120),
        placement=SpotOnly(),
        horizon=1e9,
    )
    assert seen.is_done
    assert seen.wall == seen.spot == 10 * HOUR + 200 + 9 * 10
    assert (seen.lost, seen.waiting, seen.interruptions) == (0, 0, 0)


@pytest.mark.parametrize(("warned", "lost", "notice"), [(True, 0, 120), (False, 800, 0)])
def test_a_notice_turns_lost_training_into_lost_notice(
    warned: bool, lost: float, notice: float
) -> None:
    # 200 s of restart, then 1000 s + 20 s of saving, 1000 s + 20 s, and 800 s without a save.
    seen = replay(
        [Life(start=0, end=200 + 2 * 1020 + 800)],
        job=Job(restart=200, checkpoint=20),
        saving=Saving(interval=1000, notice_idle=120),
        placement=SpotOnly(),
        horizon=5000,
        has_notice=[warned],
    )
    assert (seen.lost, seen.notice) == (lost, notice)
    assert seen.useful == (2000 if not warned else 2680)
    assert (seen.saving, seen.restart, seen.waiting) == (40, 200, 5000 - 3040)


@pytest.mark.parametrize("notice_arrives", [0.0, 1.0])
def test_poisson_lives_give_the_analytic_goodput(notice_arrives: float) -> None:
    mean, restart, checkpoint, interval = 2 * HOUR, 240.0, 20.0, 900.0
    lives = poisson_lives(seed=5, mean=mean, wait=600, total=40_000 * HOUR)
    seen = replay(
        lives,
        job=Job(restart=restart, checkpoint=checkpoint),
        saving=Saving(interval=interval, notice_idle=120),
        placement=SpotOnly(),
        horizon=40_000 * HOUR,
        has_notice=[notice_arrives == 1.0] * len(lives),
    )
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
    forecast = estimate(
        work_seconds=2000 * HOUR,
        rate_per_hour=HOUR / mean,
        restart_seconds=restart,
        checkpoint_seconds=checkpoint,
        interval_seconds=interval,
        notice_arrives=notice_arrives,
        pattern=POISSON,
    )
    assert forecast.goodput == pytest.approx(seen.goodput, rel=0.015)
