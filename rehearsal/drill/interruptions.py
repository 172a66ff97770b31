"""A drill: which interruptions a run gets, when, and what each of them cost.

The trigger is the run's own progress, read from the metrics file of the machine that trains, so an
interruption comes at the same step on a fast laptop and on a slow one.
"""

import json
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
    match = re.fullmatch(r"(kill|notice):([A-Za-z0-9_]+):(\d+)", text)
    if match is None:
        raise ValueError(f"an interruption is {SYNTAX}, got {text!r}")
    return PlannedInterruption(stage=match[2], after=int(match[3]), notice=match[1] == "notice")


@dataclass(kw_only=True, slots=True)
class SeenInterruption:
    """An interruption that happened, as seen from outside the machine.

    `progress` is the machine's last metrics line, `noticed` its line when the notice came.
    """

    planned: PlannedInterruption
    life: MachineLife
    at: float
    committed: float | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    noticed: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> Mapping[str, Any]:
        """Where the machine was when its notice came, or when it was killed."""
        return self.noticed or self.progress

    @property
    def notice_to_commit_seconds(self) -> float | None:
        """Seconds from the notice in the metadata to the first commit seen in the store."""
        return None if self.committed is None else self.committed - self.at


@dataclass(kw_only=True, slots=True)
class Drill:
    """PlannedInterruption in the planned order; `step` does what is due and returns at once.

    `first_progress` and `first_step` hold, per instance, the seconds from power-on to the first
    metrics line and to the first optimizer step, as seen from outside.
    """

    fleet: Fleet
    run: Files
    plan: Sequence[PlannedInterruption]
    interruptions: list[SeenInterruption] = field(default_factory=list)
    first_progress: dict[str, float] = field(default_factory=dict)
    first_step: dict[str, float] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)
    _num_snapshots: int = 0
    _latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    _noticed: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every planned interruption has happened."""
        return len(self.interruptions) == len(self.plan)

    def step(self) -> None:
        """Read the machines' progress, interrupt if that is due, watch for the commit."""
        for life in self.fleet.running():
            self._follow(life)
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

    def finish(self) -> None:
        """Read the machines' last lines; note how far each interrupted one had come."""
        for life in self.fleet.lives.values():
            self._follow(life)
        for interruption in self.interruptions:
            interruption.progress = self._latest.get(interruption.life.instance.id, {})
            interruption.noticed = self._noticed.get(interruption.life.instance.id, {})

    def latest(self, life: MachineLife) -> dict[str, Any]:
        """Return the latest metrics line of a machine, empty before its first."""
        return self._latest.get(life.instance.id, {})

    def _is_due(self, planned: PlannedInterruption, life: MachineLife) -> bool:
        if planned.stage == SNAPSHOT:
            # Not before this machine trains: the snapshots may be of the one before.
            return life.instance.id in self._read and self._num_snapshots >= planned.after
        return has_done(self.latest(life), planned.stage, planned.after)

    def _follow(self, life: MachineLife) -> None:
        path = life.machine.metrics_file
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read.get(life.instance.id, 0))
            for raw in file:
                if not raw.endswith(b"\n"):
                    break  # The trainer is still writing this line.
                self._read[life.instance.id] = self._read.get(life.instance.id, 0) + len(raw)
                line = json.loads(raw)
                if line["kind"] == "commit":
                    self._num_snapshots += 1
                if line["kind"] in ("step", "prepare"):
                    self._latest[life.instance.id] = line
                    self.first_progress.setdefault(life.instance.id, life.seconds)
                if line["kind"] == "notice":
                    self._noticed[life.instance.id] = line
                if line["kind"] == "step":
                    self.first_step.setdefault(life.instance.id, life.seconds)

    def _watch_commit(self) -> None:
        if not self.interruptions or not self.interruptions[-1].planned.notice:
            return
        interruption = self.interruptions[-1]
        if interruption.committed is None and interruption.life.ended is None:
            head = read_json(self.run, HEAD)
            if head is not None and is_safe(head, self._noticed.get(interruption.life.instance.id)):
                interruption.committed = time.monotonic()


def has_done(line: Mapping[str, Any], stage: str, number: int) -> bool:
    """Whether a metrics line says that so many steps or shards of the stage are done."""
    # A program's stage has no steps but its own.
    done = line.get("stage_step", line.get("done", line.get("step", 0)))
    return line.get("stage") == stage and int(done) >= number


def is_safe(head: dict[str, Any], noticed: dict[str, Any] | None) -> bool:
    """Whether the head shows that a machine with a notice has committed what it had by then.

    It may continue training after that; with nothing to commit it only releases the lease.
    """
    if head["state"] == "released":
        return True
    steps = [int(entry["step"]) for entry in head["checkpoints"]]
    return noticed is not None and bool(steps) and max(steps) >= int(noticed["step"])


def steps_lost(interruption: SeenInterruption, resumes: Sequence[dict[str, Any]]) -> int:
    """Count the optimizer steps of the interrupted machine that its successor did again.

    `resumes` are the run's metrics lines of kind resume; the successor is the next generation.
    Without one, the run finished within its notice, and nothing was lost.
    """
    reached = interruption.progress
    if reached.get("kind") != "step":
        return 0
    later = [line for line in resumes if line["generation"] > reached["generation"]]
    if not later:
        return 0
    successor = min(later, key=lambda line: int(line["generation"]))
    return int(reached["step"]) - int(successor["step"])
