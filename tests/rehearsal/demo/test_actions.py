"""When a run interrupts, and what it counts as lost."""

import json
from pathlib import Path
from typing import cast

import pytest

from rehearsal.demo.actions import (
    Action,
    RehearsedRun,
    SeenInterruption,
    is_safe,
    parse_interruption,
    steps_lost,
)
from rehearsal.demo.fleet import Fleet, MachineLife
from rehearsal.demo.run_files import FolderFiles
from rehearsal.demo.trained import PROGRAM_INTERRUPTIONS
from tests.rehearsal.demo.no_machine import NoMachine, life


def rehearsed(fleet: object, folder: Path, plan: list[Action]) -> RehearsedRun:
    return RehearsedRun(
        fleet=cast(Fleet, fleet), files=FolderFiles(folder=folder / "run"), plan=plan
    )


def interruption(progress: dict[str, object]) -> SeenInterruption:
    planned = parse_interruption("kill:head:1")
    return SeenInterruption(planned=planned, life=life(latest=progress), at=0.0)


def test_a_planned_interruption_is_read_and_written_alike() -> None:
    assert parse_interruption("notice:head:160") == Action(do="notice", at="head:160")
    assert str(parse_interruption("kill:features:4")) == "kill:features:4"


@pytest.mark.parametrize("text", ["head:1", "stop:head:1", "kill:head", "kill:head:-1"])
def test_fails_an_interruption_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="an interruption is kill:STAGE:N or notice:STAGE:N"):
        parse_interruption(text)


class Reports(NoMachine):
    """A machine whose trainer writes what a test says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metrics_file(self) -> Path:
        return self.path

    def write(self, **line: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"stage": "program", "generation": 1, **line}) + "\n")


class OneMachine:
    """A fleet of one machine, which notes how it is taken away."""

    def __init__(self, life: MachineLife) -> None:
        self.lives = {life.instance.id: life}
        self.taken: list[bool] = []

    def running(self) -> list[MachineLife]:
        return [life for life in self.lives.values() if life.ended is None]

    def interrupt(self, life: MachineLife, *, notice: bool, seconds: float | None) -> None:
        self.taken.append(notice)


def test_a_program_is_interrupted_after_a_snapshot_or_at_its_own_step(tmp_path: Path) -> None:
    machine = Reports(tmp_path / "metrics.jsonl")
    fleet = OneMachine(life(machine))
    plan = [parse_interruption(text) for text in ("kill:snapshot:2", "notice:program:80")]
    run = rehearsed(fleet, tmp_path, plan)
    run.step()
    machine.write(kind="commit", step=1)
    machine.write(kind="step", step=79)
    run.step()
    assert fleet.taken == []
    machine.write(kind="commit", step=2)
    run.step()
    assert fleet.taken == [False]
    run.step()
    machine.write(kind="step", step=80)
    assert fleet.taken == [False]
    run.step()
    assert fleet.taken == [False, True]


def test_a_script_that_saves_three_times_loses_two_machines(tmp_path: Path) -> None:
    machines = [Reports(tmp_path / name) for name in ("first.jsonl", "second.jsonl")]
    fleet = OneMachine(life(machines[0]))
    plan = [parse_interruption(text) for text in PROGRAM_INTERRUPTIONS]
    run = rehearsed(fleet, tmp_path, plan)
    machines[0].write(kind="commit", step=1)
    run.step()
    assert fleet.taken == [False]
    (first,) = fleet.lives.values()
    first.num_snapshots = 2  # one more before it was gone
    first.ended = 1.0
    fleet.lives["i-2"] = life(machines[1])
    run.step()
    machines[1].write(kind="step", step=5)
    run.step()
    assert fleet.taken == [False], "not before the second machine has saved, too"
    machines[1].write(kind="commit", step=2)
    run.step()
    assert fleet.taken == [False, True]


def test_a_workload_is_interrupted_in_a_preparation_that_has_no_steps(tmp_path: Path) -> None:
    machine = Reports(tmp_path / "metrics.jsonl")
    fleet = OneMachine(life(machine))
    plan = [parse_interruption("kill:features:2")]
    run = rehearsed(fleet, tmp_path, plan)
    machine.write(kind="prepare", stage="features", shard=1, done=1)
    run.step()
    assert fleet.taken == []
    machine.write(kind="prepare", stage="features", shard=0, done=2)
    run.step()
    assert fleet.taken == [False]


def test_steps_lost_are_those_that_the_next_generation_did_again() -> None:
    resumes = [
        {"generation": 1, "step": 0},
        {"generation": 3, "step": 90},
        {"generation": 2, "step": 40},
    ]
    assert steps_lost(interruption({"kind": "step", "generation": 1, "step": 47}), resumes) == 7


def test_an_interruption_during_preparation_loses_no_step() -> None:
    assert steps_lost(interruption({"kind": "prepare", "generation": 1, "shard": 3}), []) == 0


def test_a_run_that_ends_within_its_notice_loses_no_step() -> None:
    assert steps_lost(interruption({"kind": "step", "generation": 1, "step": 4}), []) == 0


@pytest.mark.parametrize(
    ("state", "steps", "noticed", "is_so"),
    [
        ("released", [], {}, True),
        ("running", [40], {"step": 41}, False),
        ("running", [40, 41], {"step": 41}, True),
        ("running", [40, 41, 90], {"step": 41}, True),
        ("running", [41], {}, False),
        ("running", [], {"step": 0}, False),
    ],
)
def test_a_notice_is_answered_by_the_first_commit_of_what_it_found(
    state: str, steps: list[int], noticed: dict[str, int], is_so: bool
) -> None:
    head = {"state": state, "checkpoints": [{"step": step} for step in steps]}
    assert is_safe(head, noticed) is is_so
