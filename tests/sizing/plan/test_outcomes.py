"""What a deadline costs, as the plan forecasts it: the Guard's own decision on modelled Spot."""

from dataclasses import replace

import numpy as np
import pytest

from sizing.plan.outcomes import Outcomes, deadline_fallback, deadline_sentence
from sizing.plan.plan_inputs import Request
from sizing.plan.size_plan import make_plan

ASKED = Request(workload="trajectory", recipe="full", size="g5.2xlarge")


def test_without_a_deadline_or_without_spot_there_is_nothing_to_forecast() -> None:
    assert deadline_fallback(make_plan(ASKED)) is None
    assert deadline_fallback(make_plan(replace(ASKED, deadline_hours=1.0, on_demand=True))) is None


def test_a_limit_that_every_run_keeps_is_that_of_the_longest() -> None:
    four = Outcomes(
        market="spot", hours=np.array([1.0, 2.0, 3.0, 4.0]), usd=np.array([9.0, 1.0, 2.0, 3.0])
    )
    found = {share: four.least("hours", share=share, below=None) for share in (0.5, 1.0)}
    assert found == {0.5: 2.0, 1.0: 4.0}
    # Three of four cost $3 or less.
    found = {share: four.least("hours", share=share, below=3.0) for share in (0.75, 1.0)}
    assert found == {0.75: 4.0, 1.0: None}


def test_the_nearer_the_deadline_the_more_is_on_demand_and_runs_with_time_are_in_time() -> None:
    need = make_plan(ASKED).hours_on_demand
    found = []
    for factor in (1.05, 2, 8):
        plan = make_plan(replace(ASKED, deadline_hours=factor * need))
        forecast = deadline_fallback(plan)
        assert forecast is not None
        found.append(forecast)
    tight, _, loose = found
    # The fleet starts on Spot, and that machine trains until its notice ends.
    assert (tight.fallback_share, tight.on_demand_share > 0.7) == (1, True)
    # The work may be longer than planned: no fallback makes up for that.
    assert tight.in_time_share < 0.7
    assert loose.in_time_share == 1
    # On demand for all but its first hours; the mean of the work is above its p50.
    assert tight.usd_mean == pytest.approx(make_plan(ASKED).usd_on_demand, rel=0.2)
    assert loose.usd_mean < found[1].usd_mean < tight.usd_mean
    assert loose.on_demand_share < 0.5
    assert "on demand; 100% of the runs need it, " in deadline_sentence(tight)


@pytest.mark.slow  # weekly; 5 CPU seconds
def test_the_fallback_costs_no_less_in_a_bad_case_than_spot_alone() -> None:
    """They stand on one screen: it had neither the range of the work nor the forecast's pools."""
    job = Request(workload="imagenet", recipe="full", size="g5.12xlarge", gpus=4, epochs=18)
    plan = make_plan(replace(job, deadline_hours=5))
    forecast = deadline_fallback(plan)
    assert forecast is not None
    assert plan.spot is not None
    assert forecast.usd_p90 >= plan.spot.usd_p90
    assert forecast.hours_p90 <= 5 < plan.spot.hours_p90
