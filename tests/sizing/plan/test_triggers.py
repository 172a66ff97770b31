"""Triggers: rules fire on evidence, and the models judge their advice."""

from dataclasses import replace
from pathlib import Path

import pytest

from sizing.plan.plan_inputs import Request
from sizing.plan.size_plan import Plan, make_plan
from sizing.plan.triggers import SIGNALS, as_given, fire, load_rules, signals
from tests.sizing import sample_plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return sample_plan.plan(tmp_path)


def test_a_large_batch_fires_its_rule_and_the_verdict_is_that_the_gpu_is_the_same(
    plan: Plan,
) -> None:
    fired = {each.rule.name: each for each in fire(plan, load_rules(), {})}
    assert fired["batch-4xlarge"].value == 64
    assert fired["batch-4xlarge"].verdict.startswith("no: a larger size of the family has the same")


def test_four_jobs_fire_on_what_the_user_gives(plan: Plan) -> None:
    fired = {e.rule.name: e for e in fire(plan, load_rules(), {"parallel_jobs": 4})}
    assert fired["jobs-4xlarge"].origin == "given"
    assert fired["jobs-4xlarge"].verdict.startswith("no: with memory-mapped data 4 runs need 12.0")
    assert "jobs-12xlarge" not in fired


def test_given_samples_change_the_plan_and_every_verdict_on_it(plan: Plan) -> None:
    def verdicts(samples: float) -> dict[str, str]:
        given = {"dataset_samples": samples}
        made = make_plan(
            as_given(replace(plan.request, workload="imagenet"), given),
            constants=plan.inputs.constants,
        )
        return {each.rule.name: each.verdict for each in fire(made, load_rules(), given)}

    few, many = verdicts(100_000), verdicts(20_000_000)
    assert few["dataset-4xlarge"].startswith("no: bytes decide")
    assert many["dataset-4xlarge"].startswith("yes: bytes decide")
    assert "hours-4xlarge" not in few
    assert "h cost $" in many["hours-4xlarge"]


def test_the_samples_of_a_plan_are_those_that_its_stages_train() -> None:
    # Its Prepare stage has a thousand more.
    request = Request(workload="trajectory", recipe="full", size="g5.xlarge")
    assert signals(make_plan(request))["dataset_samples"] == 8_000


@pytest.mark.parametrize(
    ("signal", "one", "other"),
    [
        ("dataset_samples", 1e5, 2e5),
        ("dataset_gib", 100, 200),
        ("grant_usd", 10, 100),
        ("batch_size", 64, 128),
        ("hours_per_experiment", 4, 40),
        ("model_mb", 100, 10_000),
        ("gpu_memory_percent", 10, 90),
        ("host_memory_percent", 80, 95),
        ("spot_saving_percent", 20, 60),
        ("parallel_jobs", 3, 12),
        ("researchers", 3, 12),
        ("gpu_utilization_percent", 5, 30),
        ("data_wait_percent", 20, 90),
    ],
)
def test_every_verdict_depends_on_the_value_of_its_signal(
    plan: Plan, signal: str, one: float, other: float
) -> None:
    def verdict(value: float) -> str:
        made = make_plan(
            as_given(plan.request, {signal: value}),
            footprints_file=plan.inputs.footprints_file,
            constants=plan.inputs.constants,
        )
        return SIGNALS[signal][1](made, value)

    assert verdict(one) != verdict(other)


def test_every_shipped_rule_can_fire(plan: Plan) -> None:
    known = signals(plan)
    for rule in load_rules():
        limit = rule.at_least if rule.at_least is not None else rule.at_most
        assert limit is not None
        assert rule.signal in SIGNALS
        assert rule.fires(limit)
        assert rule.signal in known or fire(plan, [rule], {rule.signal: limit})


def test_fails_on_a_signal_that_does_not_exist(plan: Plan) -> None:
    with pytest.raises(ValueError, match="did you mean parallel_jobs"):
        as_given(plan.request, {"paralel_jobs": 4})
