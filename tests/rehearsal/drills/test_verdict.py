"""A drill ends as written, or the verdict names what was different."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rehearsal.demo.action import Action
from rehearsal.demo.fleet import MachineLife
from rehearsal.demo.interruptions import RehearsedRun
from rehearsal.drills.drill import Expectation
from rehearsal.drills.verdict import judge, why
from tests.rehearsal.demo.no_machine import life

EQUAL = Expectation(ends="equal result")
FAILURE = Expectation(ends="failure event")


@dataclass(frozen=True)
class Written:
    """A run's files as texts."""

    files: Mapping[str, str]

    def names(self, prefix: str) -> Sequence[str]:
        return sorted(name for name in self.files if name.startswith(prefix))

    def read(self, name: str) -> bytes | None:
        text = self.files.get(name)
        return None if text is None else text.encode()


def finished(weights: str = "aa") -> Written:
    return Written(
        {
            "head.json": json.dumps({"state": "finished", "reason": None}),
            "receipt.json": json.dumps({"weights_sha256": weights}),
        }
    )


def failed(*events: dict[str, Any], state: str = "running") -> Written:
    head = {"head.json": json.dumps({"state": state, "reason": None})}
    return Written(head | {f"events/{i}.json": json.dumps(e) for i, e in enumerate(events)})


def faults_of(
    run: Written,
    expect: Expectation,
    *,
    lives: Sequence[MachineLife] = (life(ended=1.0),),
    plan: Sequence[Action] = (),
    deployed: float = 0.0,
    target_capacity: int = 0,
    **left: Any,
) -> list[str]:
    fleet = SimpleNamespace(lives=dict(enumerate(lives)), target_capacity=lambda: target_capacity)
    ran = RehearsedRun(fleet=cast(Any, fleet), files=run, plan=plan, started=deployed)
    return judge(ran, expect, finished(), **left)


TO_ZERO = {
    "name": "to-zero",
    "status": "info",
    "message": "2 attempts in a row committed nothing",
    "said": ["i-1 (g5.xlarge, spot, 0 min): no GPU"],
}


def test_an_equal_result_with_nothing_left_is_as_written() -> None:
    assert faults_of(finished(), replace(EQUAL, machines=1, markets=("spot",))) == []


def test_a_clear_failure_event_with_nothing_left_is_as_written() -> None:
    expect = replace(FAILURE, events=("to-zero: 2 attempts .* no GPU",))
    assert faults_of(failed(TO_ZERO), expect) == []
    assert why(failed(TO_ZERO)) == TO_ZERO["message"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"run": finished("bb")}, "the weights differ"),
        ({"run": failed(TO_ZERO)}, "the run did not finish (running: None)"),
        ({"run": Written({})}, "the run did not finish (new: )"),
        ({"target_capacity": 1}, "the fleet's target is 1, not 0"),
        ({"alive": ["i-9"]}, "still running: i-9"),
        ({"processes_left": 2}, "2 processes were left behind"),
        ({"guard_errors": ["boom"]}, "the Guard failed: boom"),
        ({"plan": [Action(do="kill", at="head:9")]}, "never happened: kill at head:9"),
        ({"lives": [life(), life()]}, "2 machines booted, not 1"),
        ({"lives": [life(market="on-demand")]}, "the machines' markets were on-demand"),
    ],
)
def test_fails_an_end_that_is_not_as_written(change: dict[str, Any], fault: str) -> None:
    expect = replace(EQUAL, machines=None if "markets" in fault else 1, markets=())
    if "markets" in fault:
        expect = replace(expect, markets=("spot",))
    faults = faults_of(**{"run": finished(), "expect": expect, **change})
    assert len(faults) == 1
    assert fault in faults[0]


def test_fails_attempts_with_other_ranks() -> None:
    machines = [{"generation": n, "writer": f"i-{n}", "ranks": n} for n in (1, 2)]
    receipt = json.dumps({"weights_sha256": "aa", "machines": machines})
    run = Written({**finished().files, "receipt.json": receipt})
    assert faults_of(run, replace(EQUAL, ranks=(1, 2))) == []
    (fault,) = faults_of(run, replace(EQUAL, ranks=(1, 4)))
    assert fault == "the attempts' ranks were 1, 2"


def test_fails_a_run_that_ends_after_its_deadline() -> None:
    assert faults_of(finished(), replace(EQUAL, within_hours=2.5 / 3600), deployed=-1.0) == []
    (fault,) = faults_of(finished(), replace(EQUAL, within_hours=1.5 / 3600), deployed=-1.0)
    assert fault == "it took 0.0006 hours, too long"


def test_fails_a_run_that_stopped_without_a_word() -> None:
    silent = {"name": "boot-fetch", "status": "ok", "message": "bundle fetched"}
    (fault,) = faults_of(failed(silent), FAILURE)
    assert fault == "no event says that anything failed, or why"


def test_fails_a_run_that_should_not_have_finished_and_an_event_that_is_missing() -> None:
    expect = replace(FAILURE, events=("machine-failed: .*GPU",))
    faults = faults_of(finished(), expect)
    assert faults[0].startswith("the run finished, but")
    assert faults[-1] == "no event matches 'machine-failed: .*GPU'"
