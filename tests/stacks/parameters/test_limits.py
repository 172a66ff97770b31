"""The limits of a run: by its plan where there is one, as given otherwise, never contradictory."""

import dataclasses

import pytest

from sizing.plan.size_plan import Plan
from stacks.parameters import StackParameters, decisions

SIZE = "g5.xlarge"


def parameters(**given: object) -> StackParameters:
    return StackParameters.for_size(SIZE, **given)


def taking(hours_p90: float) -> Plan:
    """The plan of the default run, as if one in ten took so many machine hours."""
    (plan,) = parameters().plans
    assert plan.spot is not None
    return dataclasses.replace(
        plan, spot=dataclasses.replace(plan.spot, machine_hours_p90=hours_p90)
    )


@pytest.mark.parametrize(("hours_p90", "most"), [(0.1, 4), (20.1, 61), (5000, 8760)])
def test_the_hours_are_three_times_the_machine_hours_of_the_plan_and_at_least_four(
    hours_p90: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = taking(hours_p90)
    monkeypatch.setattr(decisions, "make_plan", lambda request, **_: plan)
    assert parameters().max_hours == most


def test_the_dollars_are_the_hours_at_the_list_price() -> None:
    assert parameters(max_hours=100).max_usd == 101
    assert parameters(max_usd="2.5").max_usd == 2.5
    assert parameters(max_usd="0").max_usd == 0


@pytest.mark.parametrize(
    "given",
    [
        {"workload": "clips"},
        {"overrides": "epochs=1000"},
        {"dataset": "all-clips"},
    ],
    ids=["not measured", "another length", "other data"],
)
@pytest.mark.usefixtures("unmeasured")
def test_what_no_plan_covers_has_72_hours(given: dict[str, object]) -> None:
    assert (parameters(**given).max_hours, parameters(**given).max_usd) == (72, 73)


def test_a_smaller_micro_batch_is_still_the_planned_run() -> None:
    assert parameters(overrides="micro_batch=8").max_hours < 72


def test_a_run_on_demand_is_limited_by_its_uninterrupted_hours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = taking(100)
    monkeypatch.setattr(decisions, "make_plan", lambda request, **_: plan)
    assert parameters(on_demand_base=1).max_hours < 100


def test_a_silence_that_s3_explains_ends_no_run() -> None:
    """An hour of its trouble, after the wait for a dataset and ten minutes of a boot."""
    assert parameters().guard.heartbeat_timeout_seconds == 1800 + 600 + 3600


def test_an_empty_value_does_not_remove_a_limit() -> None:
    """As in -c max_usd=$BUDGET, where that is not set."""
    for name in ("deadline_hours", "max_wait_hours", "max_usd"):
        with pytest.raises(ValueError, match=f"{name} is ''; use a number"):
            parameters(**{name: ""})
    none = parameters(deadline_hours=0, max_wait_hours=0, max_usd=0)
    assert (none.deadline_hours, none.max_wait_hours, none.max_usd) == (0, 0, 0)


def test_fails_for_a_deadline_without_spot_to_fall_back_from() -> None:
    with pytest.raises(ValueError, match="deadline_hours is 5 and on_demand_base 1: a fleet that"):
        parameters(deadline_hours=5, on_demand_base=1)


def test_limits_of_a_run_that_no_plan_covers_are_not_judged_by_one() -> None:
    judged, other = (parameters(max_hours=1, overrides=given) for given in ("", "epochs=1"))
    assert [plan.request.max_hours for each in (judged, other) for plan in each.plans] == [1, None]
