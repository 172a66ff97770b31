"""A drill of which nothing came about is told apart from one that went as written."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embedded_aws import EmbeddedAws
from embedded_aws.event_bus import EventBus
from embedded_aws.faults import Fault
from rehearsal.demo.action import Action
from rehearsal.demo.fleet import Fleet
from rehearsal.demo.run_files import FolderFiles
from rehearsal.drills.drill import Drill, Expectation
from rehearsal.drills.drill_run import DrillRun
from rehearsal.machines.commands import run

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
