"""The oracle is never beaten, whatever the policy, the trace and the costs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.spot.oracle import best_goodput, least_usd
from benchmarks.spot.placements import Greedy, OnDemandOnly, UniformProgress
from sizing.fallback.decision import Fallback
from sizing.spot.replay import Clock, Placement, Prices, Replay, ReplayJob, ReplayOutcome, Saving
from sizing.spot.traces import SpotLife

HOUR = 3600.0
PRICES = {"spot_per_hour": 0.4, "on_demand_per_hour": 1.0}


def placements() -> list[Placement]:
    return [OnDemandOnly(), Greedy(), UniformProgress(), Fallback()]


def columns(seen: ReplayOutcome) -> list[float]:
    return [
        seen.useful,
        seen.lost,
        seen.saving,
        seen.restart,
        seen.notice,
        seen.seconds - seen.spot,
    ]


seconds = st.floats(1, 20_000)
worlds = st.lists(st.tuples(seconds, st.one_of(st.just(0.0), seconds), st.booleans()), max_size=25)


def lives_of(world: list[tuple[float, float, bool]]) -> list[SpotLife]:
    now, lives = 0.0, []
    for up, down, _ in world:
        lives.append(SpotLife(start=now, end=now + up))
        now += up + down
    return lives


@settings(max_examples=150, deadline=None)
@given(
    world=worlds,
    restart=st.floats(0, 900),
    checkpoint=st.floats(0, 90),
    interval=st.floats(60, 7200),
    notice_idle=st.one_of(st.none(), st.floats(0, 120)),
)
def test_every_second_is_in_one_column(
    world: list[tuple[float, float, bool]],
    restart: float,
    checkpoint: float,
    interval: float,
    notice_idle: float | None,
) -> None:
    work, horizon = 6 * HOUR, 40 * HOUR
    seen = Replay(
        lives=lives_of(world),
        job=ReplayJob(work=work, restart=restart, checkpoint=checkpoint),
        saving=Saving(interval=interval, notice_idle=notice_idle),
        horizon=horizon,
        has_notice=[warned for _, _, warned in world],
    ).run()
    assert min(columns(seen)) >= -1e-6
    assert sum(columns(seen)) == pytest.approx(seen.seconds)
    if seen.is_done:
        assert seen.useful == pytest.approx(work)
        assert seen.seconds >= work + restart - 1e-6
    else:
        assert seen.seconds == pytest.approx(horizon, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    world=worlds,
    restart=st.floats(1, 900),
    save=st.floats(0, 90),
    interval=st.floats(60, 7200),
    slack=st.floats(1.05, 4),
    wakes=st.sampled_from([0.0, 0.95, 1.0]),
    which=st.integers(0, 3),
)
def test_no_policy_at_ticks_is_late_or_cheaper_than_the_oracle(
    world: list[tuple[float, float, bool]],
    restart: float,
    save: float,
    interval: float,
    slack: float,
    wakes: float,
    which: int,
) -> None:
    lives, work = lives_of(world), 6 * HOUR
    job = ReplayJob(work=work, deadline=slack * work + restart, restart=restart, save=save)
    seen = Replay(
        lives=lives,
        job=job,
        saving=Saving(interval=interval, notice_idle=26),
        placement=placements()[which],
        prices=Prices(spot=0.4, on_demand=1.0),
        clock=Clock(tick=600, wakes=wakes),
        horizon=4 * job.deadline,
        has_notice=[warned for _, _, warned in world],
    ).run()
    assert seen.is_done_by(job.deadline / HOUR)
    bound = least_usd(lives, work=work, deadline=job.deadline, restart=restart, **PRICES)
    assert seen.usd(Prices(spot=0.4, on_demand=1.0)) >= bound - 1e-6


@settings(max_examples=80, deadline=None)
@given(world=worlds, restart=st.floats(0, 900), interval=st.floats(60, 7200))
def test_no_saving_beats_the_oracles_goodput(
    world: list[tuple[float, float, bool]], restart: float, interval: float
) -> None:
    lives = lives_of(world)
    seen = Replay(
        lives=lives,
        job=ReplayJob(restart=restart, checkpoint=1.0),
        saving=Saving(interval=interval, notice_idle=0.0),
        horizon=lives[-1].end if lives else 1.0,
    ).run()
    assert seen.goodput <= best_goodput(lives, restart=restart) + 1e-9
