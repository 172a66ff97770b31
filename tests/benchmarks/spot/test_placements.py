"""Where to run: the rules of the policies compared, and what the Guard's decision is worth."""

import random
from collections.abc import Callable

import pytest

from benchmarks.spot.placements import Greedy, OnDemandOnly, UniformProgress
from sizing.fallback.decision import Fallback
from sizing.fallback.situation import Place, Situation
from sizing.spot.replay import Clock, Placement, Prices, Replay, ReplayJob, ReplayOutcome, Saving
from sizing.spot.traces import SpotLife
from tests.sizing.sample_lives import poisson_lives

HOUR = 3600.0
PRICES = Prices(spot=0.4, on_demand=1.0)


def situation(
    hours: float, done: float, *, place: Place = "none", spot: str | None = None
) -> Situation:
    """Ten hours of work in twenty, `done` of them after `hours`."""
    return Situation(
        now=hours * HOUR, deadline=20 * HOUR, work=10 * HOUR, left=(10 - done) * HOUR,
        committed_left=(10 - done) * HOUR, place=place, spot_machine=spot, asks_for_spot=True,
        restart=300, save=0, interval=600, until_next=180, spot_per_hour=0.4, on_demand_per_hour=1,
    )  # fmt: skip


def replayed(
    placement: Placement, lives: list[SpotLife], job: ReplayJob, *, clock: Clock | None = None
) -> ReplayOutcome:
    return Replay(
        lives=lives,
        job=job,
        saving=Saving(interval=600, notice_idle=26),
        placement=placement,
        prices=PRICES,
        clock=clock or Clock(),
        horizon=3 * job.deadline,
        has_notice=[index % 10 > 0 for index in range(len(lives))],
    ).run()


@pytest.mark.parametrize("make", [Fallback, Greedy, UniformProgress])
def test_everyone_goes_on_demand_when_no_other_try_fits(make: Callable[[], Placement]) -> None:
    assert make().choose(situation(15, 5, spot="i-1")).market == "on-demand"


def test_greedy_waits_for_spot_until_the_deadline_is_in_danger() -> None:
    assert Greedy().choose(situation(9, 0)).market == "spot"
    assert Greedy().choose(situation(9.9, 0)).market == "on-demand"


def test_uniform_progress_stays_on_demand_until_spot_returns() -> None:
    policy = UniformProgress()
    assert policy.choose(situation(4, 2.5)).market == "spot"
    assert policy.choose(situation(4, 1.9)).market == "bridge"
    assert policy.choose(situation(4, 2.5, place="on-demand")).market == "bridge"
    assert policy.choose(situation(4, 1.9, place="on-demand", spot="i-1")).market == "spot"


def test_on_demand_alone_pays_for_one_start_and_the_work() -> None:
    job = ReplayJob(work=10 * HOUR, deadline=20 * HOUR, restart=300, save=15)
    seen = replayed(OnDemandOnly(), [], job)
    assert seen.is_done
    assert (seen.spot, seen.on_demand) == (0, 10 * HOUR + 300)


def test_a_machine_that_spot_sends_back_costs_its_overlap_and_no_work() -> None:
    # No Spot for two hours of a job that cannot wait for long; then Spot for good.
    job = ReplayJob(work=4 * HOUR, deadline=5 * HOUR, restart=300, save=15)
    seen = replayed(
        Fallback(), [SpotLife(start=2 * HOUR, end=99 * HOUR)], job, clock=Clock(wakes=1.0)
    )
    assert seen.is_done_by(5)
    assert seen.losses == 0
    assert seen.on_demand < 2 * HOUR
    # Both machines together worked four hours, each started once, and the first saved.
    assert seen.spot + seen.on_demand == pytest.approx(4 * HOUR + 2 * 300 + 15, abs=60)


def test_the_decision_costs_less_than_the_rules_where_spot_comes_and_goes() -> None:
    for work, deadline in ((4, 6), (24, 36)):
        job = ReplayJob(
            work=work * HOUR, deadline=deadline * HOUR, restart=300, checkpoint=5, save=15
        )
        sums = dict.fromkeys((Fallback, Greedy, UniformProgress, OnDemandOnly), 0.0)
        for seed in range(40 // work):
            lives = poisson_lives(seed=seed, mean=2 * HOUR, wait=3 * HOUR, total=3 * job.deadline)
            for make in sums:
                seen = replayed(make(), lives, job)
                assert seen.is_done_by(deadline), make
                sums[make] += seen.usd(PRICES)
        assert min(sums, key=lambda make: sums[make]) is Fallback


def test_the_decision_does_not_ride_what_never_lasts() -> None:
    # Lives of two minutes, restarts of five: once it has seen that, on demand is cheaper.
    lives = [SpotLife(start=t * HOUR / 4, end=t * HOUR / 4 + 120) for t in range(400)]
    job = ReplayJob(work=48 * HOUR, deadline=60 * HOUR, restart=300, checkpoint=5, save=15)
    assert replayed(Fallback(), lives, job).usd(PRICES) < 1.06 * 48


def test_the_decision_waits_for_spot_that_surely_comes() -> None:
    # An hour of every two, and four times the time that the work takes: on demand is not needed.
    lives = [SpotLife(start=2 * t * HOUR, end=(2 * t + 1) * HOUR) for t in range(100)]
    job = ReplayJob(work=20 * HOUR, deadline=80 * HOUR, restart=120, checkpoint=5, save=15)
    seen = replayed(Fallback(), lives, job)
    assert seen.on_demand == 0
    assert seen.usd(PRICES) < 1.15 * 0.4 * 20


@pytest.mark.parametrize("tick", [120.0, 600.0])
@pytest.mark.parametrize("wakes", [0.0, 0.95])
def test_every_deadline_is_met_whatever_spot_does(tick: float, wakes: float) -> None:
    luck = random.Random(int(tick + wakes * 100))
    clock = Clock(tick=tick, wakes=wakes)
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
        job = ReplayJob(work=work, deadline=least * luck.choice([1.0, 1.1, 1.5]), restart=restart,
                  checkpoint=5, save=15)  # fmt: skip
        # No notices: what was not committed is lost.
        seen = Replay(
            lives=lives, job=job, saving=Saving(interval=600, notice_idle=None),
            placement=Fallback(), prices=PRICES, clock=clock, horizon=3 * job.deadline,
            has_notice=[False] * len(lives),
        ).run()  # fmt: skip
        assert seen.is_done_by(job.deadline / HOUR), (job, clock)
