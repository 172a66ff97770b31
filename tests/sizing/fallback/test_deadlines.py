"""Jobs replayed with the Guard's decision: no deadline is missed, Spot is taken where it pays."""

import random

import pytest

from sizing.fallback.decision import Decision, Situation, SpotHistory, decide_market
from sizing.spot.interruptions import SpotLife
from sizing.spot.replay import Prices, Replay, ReplayJob, ReplayOutcome
from tests.sizing.sample_lives import poisson_lives

HOUR = 3600.0
PRICES = Prices(spot=0.4, on_demand=1.0)


def greedy(situation: Situation, history: SpotHistory) -> Decision:
    """The greedy policy of "Can't Be Late" (NSDI'24): Spot or wait, until the deadline is near."""
    return Decision(market="on-demand" if situation.is_in_danger else "spot", reason="a rule")


def job_of(
    *, work: float, deadline: float, restart: float = 300, checkpoint: float = 5
) -> ReplayJob:
    return ReplayJob(
        work=work, deadline=deadline, restart=restart, checkpoint=checkpoint, save=15,
        interval=600, notice_idle=26,
    )  # fmt: skip


def replayed(lives: list[SpotLife], job: ReplayJob, *, wakes: float = 0.95) -> ReplayOutcome:
    return Replay(
        lives=lives,
        job=job,
        fallback=PRICES,
        wakes=wakes,
        horizon=3 * job.deadline,
        has_notice=[index % 10 > 0 for index in range(len(lives))],
    ).run()


def test_a_machine_that_spot_sends_back_costs_its_overlap_and_no_work() -> None:
    # No Spot for two hours of a job that cannot wait for long; then Spot for good.
    job = job_of(work=4 * HOUR, deadline=5 * HOUR, checkpoint=0)
    seen = replayed([SpotLife(start=2 * HOUR, end=99 * HOUR)], job, wakes=1.0)
    assert seen.is_done_by(5)
    assert seen.losses == 0
    assert seen.on_demand < 2 * HOUR
    # Both machines together worked four hours, each started once, and the first saved.
    assert seen.spot + seen.on_demand == pytest.approx(4 * HOUR + 2 * 300 + 15, abs=60)


def test_the_decision_costs_less_than_waiting_where_spot_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for work, deadline in ((4, 6), (24, 36)):
        job = job_of(work=work * HOUR, deadline=deadline * HOUR)
        sums = dict.fromkeys((decide_market, greedy), 0.0)
        for seed in range(40 // work):
            lives = poisson_lives(seed=seed, mean=2 * HOUR, wait=3 * HOUR, total=3 * job.deadline)
            for policy in sums:
                monkeypatch.setattr("sizing.spot.replay.decide_market", policy)
                seen = replayed(lives, job)
                assert seen.is_done_by(deadline), policy
                sums[policy] += seen.usd(PRICES)
        assert sums[decide_market] < sums[greedy]


def test_the_decision_does_not_ride_what_never_lasts() -> None:
    # Lives of two minutes, restarts of five: once it has seen that, on demand is cheaper.
    lives = [SpotLife(start=t * HOUR / 4, end=t * HOUR / 4 + 120) for t in range(400)]
    job = job_of(work=48 * HOUR, deadline=60 * HOUR)
    assert replayed(lives, job).usd(PRICES) < 1.06 * 48


def test_the_decision_waits_for_spot_that_surely_comes() -> None:
    # An hour of every two, and four times the time that the work takes: on demand is not needed.
    lives = [SpotLife(start=2 * t * HOUR, end=(2 * t + 1) * HOUR) for t in range(100)]
    job = job_of(work=20 * HOUR, deadline=80 * HOUR, restart=120)
    seen = replayed(lives, job)
    assert seen.on_demand == 0
    assert seen.usd(PRICES) < 1.15 * 0.4 * 20


@pytest.mark.parametrize("tick", [120.0, 600.0])
@pytest.mark.parametrize("wakes", [0.0, 0.95])
def test_every_deadline_is_met_whatever_spot_does(tick: float, wakes: float) -> None:
    luck = random.Random(int(tick + wakes * 100))
    for _ in range(12):
        work = luck.choice([0.5, 2, 6]) * HOUR
        restart, now = luck.uniform(30, 900), 0.0
        lives = []
        up, down = luck.uniform(60, 20_000), luck.uniform(1, 20_000)
        while now < 3 * work:
            end = now + luck.expovariate(1 / up)
            lives.append(SpotLife(start=now, end=end))
            now = end + luck.expovariate(1 / down)
        # The tightest deadline that on demand alone can meet with one start; and looser ones.
        least = work * (1 + 5 / 600) + 2 * restart
        job = job_of(work=work, deadline=least * luck.choice([1.0, 1.1, 1.5]), restart=restart)
        # No notices: what was not committed is lost.
        seen = Replay(
            lives=lives, job=job, fallback=PRICES, tick=tick, wakes=wakes,
            horizon=3 * job.deadline, has_notice=[False] * len(lives),
        ).run()  # fmt: skip
        assert seen.is_done_by(job.deadline / HOUR), (job, tick, wakes)
