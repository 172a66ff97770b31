"""Where to run: each rule of the paper in a small world, and the policy that looks ahead."""

import pytest

from sizing.policies.lookahead import Lookahead
from sizing.policies.placements import Greedy, OnDemandOnly, Place, UniformProgress
from sizing.spot.replay import Job, Ledger, Placement, Saving, View, replay
from sizing.spot.traces import Life
from tests.sizing.sample_lives import poisson_lives

HOUR = 3600.0
JOB = Job(work=10 * HOUR, deadline=20 * HOUR, restart=300, checkpoint=0)


def view(
    hours: float, done: float, *, place: Place = "none", has_spot: bool = False, job: Job = JOB
) -> View:
    return View(
        now=hours * HOUR, progress=done * HOUR, place=place, has_spot=has_spot, job=job,
        interval=HOUR,
    )  # fmt: skip


def test_everyone_goes_on_demand_when_no_other_try_fits() -> None:
    # 20 h left of the deadline's 30 would not matter: R = 5 h, C = 5 h.
    late = view(15, 5, has_spot=True)
    for policy in (Greedy(), UniformProgress(), Lookahead(spot_per_hour=0.4, on_demand_per_hour=1)):
        assert policy.choose(late)[0] == "on-demand"


def test_greedy_waits_until_the_safety_net() -> None:
    place, again = Greedy().choose(view(1, 0.5))
    assert place == "none"
    # R = C + 2d at 20 h - 9.5 h - 600 s.
    assert again == pytest.approx(10.5 * HOUR - 600, abs=2)


def test_uniform_progress_catches_up_on_demand_and_stays_until_it_is_ahead() -> None:
    policy = UniformProgress()
    assert policy.choose(view(4, 2.5))[0] == "none"
    assert policy.choose(view(4, 1.9))[0] == "on-demand"
    # Hysteresis: cp >= ep(t + 2d) = (4 h + 600 s) / 2.
    assert policy.choose(view(4, 2.05, place="on-demand", has_spot=True))[0] == "on-demand"
    assert policy.choose(view(4, 2.1, place="on-demand", has_spot=True))[0] == "spot"
    assert policy.choose(view(4, 2.1, place="on-demand"))[0] == "none"


def test_uniform_progress_may_stay_on_demand_until_spot_comes() -> None:
    caught_up = view(4, 2.1, place="on-demand")
    with_spot = view(4, 2.1, place="on-demand", has_spot=True)
    assert UniformProgress(stays=True).choose(caught_up)[0] == "on-demand"
    assert UniformProgress().choose(caught_up)[0] == "none"
    assert UniformProgress(stays=True).choose(with_spot)[0] == "spot"


def test_uniform_progress_takes_spot_even_when_behind() -> None:
    assert UniformProgress().choose(view(4, 1.0, has_spot=True))[0] == "spot"


def cost(placement: Placement, lives: list[Life], job: Job) -> tuple[float, Ledger]:
    seen = replay(
        lives, job=job, saving=Saving(interval=HOUR, notice_idle=60), placement=placement,
        horizon=3 * job.deadline,
    )  # fmt: skip
    return seen.usd(spot_per_hour=0.4, on_demand_per_hour=1.0), seen


def test_looking_ahead_costs_less_where_spot_comes_and_goes() -> None:
    job = Job(work=48 * HOUR, deadline=72 * HOUR, restart=300, checkpoint=5)
    sums = {"greedy": 0.0, "uniform": 0.0, "ahead": 0.0, "on demand": 0.0}
    for seed in range(12):
        lives = poisson_lives(seed=seed, mean=2 * HOUR, wait=3 * HOUR, total=72 * HOUR)
        for name, policy in (
            ("greedy", Greedy()),
            ("uniform", UniformProgress()),
            ("ahead", Lookahead(spot_per_hour=0.4, on_demand_per_hour=1.0)),
            ("on demand", OnDemandOnly()),
        ):
            usd, seen = cost(policy, lives, job)
            assert seen.is_done
            assert seen.wall <= job.deadline + 1
            sums[name] += usd
    assert sums["ahead"] < min(sums["greedy"], sums["uniform"], sums["on demand"])


def test_looking_ahead_does_not_ride_what_never_lasts() -> None:
    # Lives of two minutes, restart of five: once it has seen that, on demand is cheaper.
    lives = [Life(start=t * HOUR / 4, end=t * HOUR / 4 + 120) for t in range(400)]
    job = Job(work=48 * HOUR, deadline=60 * HOUR, restart=300, checkpoint=5)
    usd, seen = cost(Lookahead(spot_per_hour=0.4, on_demand_per_hour=1.0), lives, job)
    assert seen.is_done
    assert usd < 1.1 * 48
    # It met 240 of them.
    assert seen.interruptions < 80


def test_looking_ahead_waits_for_spot_that_surely_comes() -> None:
    # An hour of every two, and four times the time that the work takes: on demand is not needed.
    lives = [Life(start=2 * t * HOUR, end=(2 * t + 1) * HOUR) for t in range(100)]
    job = Job(work=20 * HOUR, deadline=80 * HOUR, restart=120, checkpoint=5)
    usd, seen = cost(Lookahead(spot_per_hour=0.4, on_demand_per_hour=1.0), lives, job)
    assert seen.on_demand < 0.5 * HOUR
    assert usd < 1.15 * 0.4 * 20
