"""A drill: which interruptions a run gets, when, and what each of them cost.

The trigger is the run's own progress, read from the metrics file of the machine that trains, so an
interruption comes at the same step on a fast laptop and on a slow one.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.keys import HEAD
from rehearsal.drill.fleet import Fleet, MachineLife
from rehearsal.drill.run_files import Files, read_json

SYNTAX = "kill:STAGE:N or notice:STAGE:N; of a program kill:program:STEP or kill:snapshot:N"
# In place of a stage: what counts are the snapshots of a program that have been committed.
SNAPSHOT = "snapshot"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedInterruption:
    """An interruption due once `stage` has done `after` steps (or shards, or snapshots)."""

    stage: str
    after: int
    notice: bool

    def __str__(self) -> str:
        return f"{'notice' if self.notice else 'kill'}:{self.stage}:{self.after}"


def parse_interruption(text: str) -> PlannedInterruption:
    """Read `kill:head:60` or `notice:head:150`."""
    match = re.fullmatch(r"(kill|notice):([^:\s]+):(\d+)", text)
    if match is None:
        raise ValueError(f"an interruption is {SYNTAX}, got {text!r}")
    return PlannedInterruption(stage=match[2], after=int(match[3]), notice=match[1] == "notice")


def check_stages(plan: Sequence[PlannedInterruption], stages: Sequence[str]) -> None:
    """Refuse an interruption in a stage that what is trained does not have: it would never come."""
    for planned in plan:
        if planned.stage not in stages:
            raise ValueError(
                f"the interruption {planned} is in stage {planned.stage!r}, which does not exist; "
                f"known are {', '.join(stages)}"
            )


@dataclass(kw_only=True, slots=True)
class SeenInterruption:
    """An interruption that happened, as seen from outside the machine."""

    planned: PlannedInterruption
    life: MachineLife
    at: float
    committed: float | None = None

    @property
    def reached(self) -> Mapping[str, Any]:
        """Where the machine was when its notice came, or when it was killed."""
        return self.life.noticed or self.life.latest

    @property
    def notice_to_commit_seconds(self) -> float | None:
        """Seconds from the notice in the metadata to the first commit seen in the store."""
        return None if self.committed is None else self.committed - self.at


@dataclass(kw_only=True, slots=True)
class Drill:
    """The planned interruptions in their order; `step` does what is due and returns at once."""

    fleet: Fleet
    run: Files
    plan: Sequence[PlannedInterruption]
    interruptions: list[SeenInterruption] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every planned interruption has happened."""
        return len(self.interruptions) == len(self.plan)

    def step(self) -> None:
        """Read the machines' progress, interrupt if that is due, watch for the commit."""
        for life in self.fleet.running():
            life.read_metrics()
        self._watch_commit()
        if self.is_complete:
            return
        planned = self.plan[len(self.interruptions)]
        for life in self.fleet.running():
            if life.ends_at is None and self._is_due(planned, life):
                self.interruptions.append(
                    SeenInterruption(planned=planned, life=life, at=time.monotonic())
                )
                self.fleet.interrupt(life, notice=planned.notice)
                return

    def _is_due(self, planned: PlannedInterruption, life: MachineLife) -> bool:
        if planned.stage == SNAPSHOT:
            # Not before this machine has one of its own: others may be of the one before.
            num_snapshots = sum(each.num_snapshots for each in self.fleet.lives.values())
            return life.num_snapshots > 0 and num_snapshots >= planned.after
        return has_done(life.latest, planned.stage, planned.after)

    def _watch_commit(self) -> None:
        if not self.interruptions or not self.interruptions[-1].planned.notice:
            return
        interruption = self.interruptions[-1]
        if interruption.committed is None and interruption.life.ended is None:
            head = read_json(self.run, HEAD)
            if head is not None and is_safe(head, interruption.life.noticed):
                interruption.committed = time.monotonic()


def has_done(line: Mapping[str, Any], stage: str, number: int) -> bool:
    """Whether a metrics line says that so many steps or shards of the stage are done."""
    # A program's stage has no steps but its own.
    done = line.get("stage_step", line.get("done", line.get("step", 0)))
    return line.get("stage") == stage and int(done) >= number


def is_safe(head: Mapping[str, Any], noticed: Mapping[str, Any]) -> bool:
    """Whether the head shows that a machine with a notice has committed what it had by then.

    It may continue training after that; with nothing to commit it only releases the lease.
    """
    if head["state"] == "released":
        return True
    steps = [int(entry["step"]) for entry in head["checkpoints"]]
    return bool(noticed and steps) and max(steps) >= int(noticed["step"])


def steps_lost(interruption: SeenInterruption, resumes: Sequence[dict[str, Any]]) -> int:
    """Count the optimizer steps of the interrupted machine that its successor did again.

    `resumes` are the run's metrics lines of kind resume; the successor is the next generation.
    Without one, the run finished within its notice, and nothing was lost.
    """
    reached = interruption.life.latest
    if reached.get("kind") != "step":
        return 0
    later = [line for line in resumes if line["generation"] > reached["generation"]]
    if not later:
        return 0
    successor = min(later, key=lambda line: int(line["generation"]))
    return int(reached["step"]) - int(successor["step"])
