"""Triggers: rules fire on evidence, and the models judge their advice."""

import json
from pathlib import Path

import pytest

from sizing.plan.plan import Plan, make_plan
from sizing.plan.request import Request
from sizing.plan.triggers import Rule, fire, load_rules, signals
from tests.sizing import sample_footprints


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(
        Request(workload="trajectory", recipe="full", size="g5.2xlarge"),
        footprints_file=sample_footprints.write(tmp_path / "footprints.json"),
        calibration_file=tmp_path / "none.json",
    )


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


def test_thresholds_can_be_changed(plan: Plan, tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rule = {"name": "mine", "signal": "batch_size", "at_least": 100, "consider": "nothing"}
    rules.write_text(json.dumps({"rules": [rule]}))
    assert fire(plan, load_rules(rules), {}) == []
    assert [e.rule.name for e in fire(plan, load_rules(rules), {"batch_size": 128})] == ["mine"]


def test_rules_written_before_says_had_its_name_are_read(tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rule = {"name": "a", "signal": "batch_size", "at_least": 1, "consider": "b", "seed": "why"}
    rules.write_text(json.dumps({"rules": [rule]}))
    assert [each.says for each in load_rules(rules)] == ["why"]


def test_every_shipped_rule_can_fire(plan: Plan) -> None:
    known = signals(plan)
    for rule in load_rules():
        limit = rule.at_least if rule.at_least is not None else rule.at_most
        assert limit is not None
        assert rule.fires(limit)
        assert rule.signal in known or fire(plan, [rule], {rule.signal: limit})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"rules": [{"name": "a"}]}', "cannot be read as rules"),
        ("[", "cannot be read as rules"),
        (
            '{"rules": [{"name": "a", "signal": "batch_siz", "at_least": 1, "consider": "b"}]}',
            "did you mean batch_size",
        ),
        ('{"rules": [{"name": "a", "signal": "model_mb", "consider": "b"}]}', "at_least or"),
    ],
)
def test_fails_on_rules_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_rules(path)


def test_fails_on_a_signal_that_does_not_exist(plan: Plan) -> None:
    with pytest.raises(ValueError, match="did you mean parallel_jobs"):
        fire(plan, load_rules(), {"paralel_jobs": 4})


def test_a_rule_has_one_threshold() -> None:
    with pytest.raises(ValueError, match="needs either"):
        Rule(name="a", signal="b", consider="c", at_least=1, at_most=2)
