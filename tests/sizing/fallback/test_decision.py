"""The decision in single situations: danger, cost, and what was learned of Spot."""

import time
from dataclasses import asdict, replace

import pytest

from sizing.fallback.decision import (
    PRIOR_LIFE_HOURS,
    PRIOR_WAIT_HOURS,
    Situation,
    SpotHistory,
    make_table,
    observe_market,
)
from sizing.fallback.decision import decide_market as decide
from sizing.spot.interruptions import interruptions

HOUR = 3600.0
START = Situation(
    now=0, deadline=30 * HOUR, work=20 * HOUR, left=20 * HOUR, committed_left=20 * HOUR,
    place="none", spot_machine=None, asks_for_spot=True, restart=180, save=15, interval=600,
    until_next=180, spot_per_hour=0.5, on_demand_per_hour=1.0,
)  # fmt: skip


def test_before_it_has_seen_anything_it_expects_what_the_plan_does_of_one_zone() -> None:
    plan = interruptions(pools=1)
    assert pytest.approx(plan.rate_per_hour, rel=0.02) == 1 / PRIOR_LIFE_HOURS
    assert plan.wait_seconds == pytest.approx(3600 * PRIOR_WAIT_HOURS)


def test_with_hours_of_slack_it_waits_for_spot_and_says_what_each_market_costs() -> None:
    decision = decide(START, SpotHistory())
    assert decision.market == "spot"
    assert decision.figures["usd_spot"] < decision.figures["usd_bridge"]
    assert decision.figures["usd_bridge"] < decision.figures["usd_on_demand"]
    # On demand alone: the work and one start.
    assert decision.figures["usd_on_demand"] == pytest.approx(20 + 195 / HOUR)
    assert "spot $" in decision.reason


def test_with_little_slack_it_runs_on_demand_until_spot_comes() -> None:
    late = replace(START, now=9.5 * HOUR)
    assert decide(late, SpotHistory()).market == "bridge"
    training = replace(late, place="on-demand")
    assert decide(training, SpotHistory()).market == "bridge"
    arrived = replace(training, spot_machine="i-1")
    assert decide(arrived, SpotHistory()).market == "spot"


def test_in_danger_it_goes_on_demand_for_good_and_says_by_how_much() -> None:
    # 180 s to the next decision, 195 s to start a machine.
    ride = replace(START, now=10 * HOUR - 376, place="spot", spot_machine="i-1")
    assert decide(ride, SpotHistory()).market == "spot"
    late = replace(ride, now=10 * HOUR - 374)
    decision = decide(late, SpotHistory())
    assert decision.market == "on-demand"
    assert "6.2 min may pass without progress, and 6.2 must remain" in decision.reason
    # What is not committed may be lost; an orderly move from on demand loses nothing.
    assert decide(replace(ride, left=ride.left - HOUR), SpotHistory()).market == "spot"
    assert decide(replace(ride, committed_left=ride.left + 60), SpotHistory()).market == "on-demand"


def test_the_last_minutes_are_not_worth_a_move_to_spot() -> None:
    for left in (60, 120):
        end = replace(START, place="on-demand", left=left, committed_left=left)
        # Nor is a Spot machine asked for that would be sent away.
        for machine in ("i-1", None):
            assert decide(replace(end, spot_machine=machine), SpotHistory()).market == "on-demand"


def test_a_run_that_needs_far_less_than_planned_is_decided_as_quickly() -> None:
    make_table.cache_clear()
    began = time.process_time()
    short = replace(START, deadline=HOUR, work=48 * HOUR, left=600, committed_left=600)
    assert decide(short, SpotHistory()).market == "spot"
    assert time.process_time() - began < 1.0


def test_evidence_counts_hours_and_ends_of_both_states_and_forgets() -> None:
    seen = SpotHistory()
    assert seen.losses_per_hour == pytest.approx(1 / PRIOR_LIFE_HOURS)
    assert seen.arrivals_per_hour == pytest.approx(1 / PRIOR_WAIT_HOURS)
    for hours, machine in ((0, None), (1, "i-1"), (3, "i-1"), (4, "i-2"), (5, None)):
        seen = observe_market(seen, seconds=hours * HOUR, machine=machine, asks=True)
    # i-2 came in the same hour in which i-1 was lost.
    assert seen.losses == pytest.approx(2, rel=0.05)
    assert seen.arrivals == pytest.approx(2, rel=0.12)
    assert (seen.up_hours, seen.down_hours) == (
        pytest.approx(4, rel=0.1),
        pytest.approx(1, rel=0.2),
    )
    later = observe_market(seen, seconds=29 * HOUR, machine=None, asks=True)
    assert later.losses == pytest.approx(seen.losses / 2)
    assert SpotHistory(**asdict(later)) == later


def test_nothing_is_learned_while_spot_is_not_asked_for() -> None:
    seen = observe_market(SpotHistory(), seconds=0, machine="i-1", asks=False)
    after = observe_market(seen, seconds=10 * HOUR, machine=None, asks=False)
    assert (after.up_hours, after.losses, after.down_hours, after.arrivals) == (0, 0, 0, 0)


def test_a_decision_takes_a_fraction_of_a_second() -> None:
    make_table.cache_clear()
    began = time.process_time()
    decide(START, SpotHistory())
    assert time.process_time() - began < 1.0
