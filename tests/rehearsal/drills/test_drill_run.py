"""A drill of which nothing came about is told apart from one that went as written."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from contract.trace import RunTrace
from contract.verify import broken_rules
from embedded_aws import EmbeddedAws
from embedded_aws.event_bus import EventBus
from embedded_aws.faults import Fault
from rehearsal.demo.actions import Action, RehearsedRun
from rehearsal.demo.fleet import Fleet, MachineLife
from rehearsal.demo.run_files import FolderFiles
from rehearsal.drills.drill import Drill, Expectation
from rehearsal.drills.drill_run import DrillRun, judge, why
from rehearsal.machines.commands import run
from tests.rehearsal.demo.no_machine import life

MET, UNMET = Fault(action="s3:GetObject", status=503), Fault(action="ec2:*", status=403)
LATER, NEVER = Fault(action="s3:PutObject", status=500), Fault(action="sts:*", status=500)


class Deployed:
    """A deployment without machines."""

    training = "TrainingStack"

    def __init__(self, aws: EmbeddedAws) -> None:
        self.aws = aws

    def deploy(self, assembly: Path, stack: str) -> None:
        """All is there."""

    def fleet(self, bus: EventBus, boot: Any, say: Any) -> Fleet:
        return Fleet(aws=self.aws, bus=bus, id="sfr-1", boot=boot, say=say, stack="s")

    def run_files(self) -> FolderFiles:
        return FolderFiles(folder=Path())


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


@pytest.fixture
def drill_run(tmp_path: Path, aws: EmbeddedAws) -> DrillRun:
    drill = Drill(
        name="mine",
        about="faults",
        expect=Expectation(ends="equal result"),
        faults=(MET, UNMET),
        actions=(
            Action(at="head:1", do="faults", faults=(LATER,)),
            Action(at="head:2", do="faults", faults=(NEVER,)),
        ),
    )
    stacks: Any = Deployed(aws)
    return DrillRun(drill=drill, stacks=stacks, context={}, folder=tmp_path, say=print, log=print)


def test_a_fault_that_no_request_met_is_undone(
    drill_run: DrillRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = drill_run.stacks.aws.faults

    def follow(fleet: Fleet, *_: object, **__: object) -> None:
        faults.meet("s3:GetObject")
        drill_run.run.done = 1
        faults.begin((LATER,))
        faults.clock_ahead_seconds = 60

    monkeypatch.setattr(Fleet, "follow", follow)
    drill_run.rehearse(Path())
    assert drill_run.run.undone == ["faults at head:2"]
    assert drill_run.unmet == [UNMET, LATER]
    assert faults.meet("s3:PutObject") is None
    assert faults.clock_ahead_seconds == 0


def test_the_guard_is_invoked_from_its_action_on(
    drill_run: DrillRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = Action(at="log:denied", do="guard")
    drill_run.drill = replace(drill_run.drill, guard_is_invoked=False, actions=(guard,))
    seen = []

    def follow(fleet: Fleet, *_: object, **__: object) -> None:
        seen.append(fleet.bus.invokes)
        drill_run._do(guard, None)
        seen.append(fleet.bus.invokes)

    monkeypatch.setattr(Fleet, "follow", follow)
    drill_run.rehearse(Path())
    assert seen == [False, True]


def test_paths_of_a_command_begin_with_the_root_of_a_process_machine_or_nothing(
    drill_run: DrillRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    action = Action(at="head:1", do="execute", command='echo "$MACHINE_ROOT/data"')
    drill_run.drill = replace(drill_run.drill, actions=(action,))
    monkeypatch.setattr(Fleet, "follow", lambda *_, **__: None)
    drill_run.rehearse(Path())
    drill_run.log = said.append
    life: Any = SimpleNamespace(machine=SimpleNamespace(execute=run))
    for root in ("", "/machines/i-1"):
        monkeypatch.delenv("MACHINE_ROOT", raising=False)
        if root:
            monkeypatch.setenv("MACHINE_ROOT", root)
        drill_run._do(action, life)
    assert [each.strip() for each in said] == ["/data", "/machines/i-1/data"]


EQUAL = Expectation(ends="equal result")
FAILURE = Expectation(ends="failure event")


@dataclass(frozen=True)
class Written:
    """A run's files as texts."""

    files: Mapping[str, str]

    def sizes(self, prefix: str) -> dict[str, int]:
        return {name: len(text) for name, text in self.files.items() if name.startswith(prefix)}

    def read(self, name: str) -> bytes | None:
        text = self.files.get(name)
        return None if text is None else text.encode()

    def rules_broken(self) -> list[str]:
        return broken_rules(RunTrace.read(self.sizes, lambda names: map(self.read, names)))


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


@pytest.mark.parametrize("expect", [EQUAL, FAILURE])
def test_fails_a_run_whose_record_breaks_a_rule(expect: Expectation) -> None:
    named = {"name": "00000003-g0001-a", "step": 3, "files": [{"name": "state.json", "bytes": 2}]}
    state = "finished" if expect is EQUAL else "running"
    head = {"state": state, "generation": 1, "checkpoints": [named]}
    written = finished() if expect is EQUAL else failed(TO_ZERO)
    found = faults_of(Written({**written.files, "head.json": json.dumps(head)}), expect)
    assert found == [
        "deleted-after-forgotten: the head names 2 bytes of "
        "checkpoints/00000003-g0001-a/state.json, and 0 are there"
    ]


def test_fails_a_run_that_should_not_have_finished_and_an_event_that_is_missing() -> None:
    expect = replace(FAILURE, events=("machine-failed: .*GPU",))
    faults = faults_of(finished(), expect)
    assert faults[0].startswith("the run finished, but")
    assert faults[-1] == "no event matches 'machine-failed: .*GPU'"
