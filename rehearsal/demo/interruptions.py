"""A rehearsed run: the actions on it, one after the other, and the cost of its interruptions."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.keys import HEAD
from rehearsal.demo.action import INTERRUPTIONS, Action, Seen
from rehearsal.demo.fleet import Fleet, MachineLife
from rehearsal.demo.run_files import Files, read_json


@dataclass(kw_only=True, slots=True)
class SeenInterruption:
    """An interruption that happened, as seen from outside the machine."""

    planned: Action
    life: MachineLife
    at: float
    committed: float | None = None

    @property
    def notice(self) -> bool:
        """Whether it came with a notice."""
        return self.planned.do == "notice"

    @property
    def reached(self) -> Mapping[str, Any]:
        """The machine's progress when its notice came or when it was killed."""
        return self.life.noticed or self.life.latest

    @property
    def notice_to_commit_seconds(self) -> float | None:
        """Seconds from the notice in the metadata to the first commit seen in the store."""
        return None if self.committed is None else self.committed - self.at


@dataclass(kw_only=True, slots=True)
class RehearsedRun:
    """A run and its planned actions; `step` carries out the one that is due and returns at once.

    `files` are what the run publishes. `tell` gets a line before each action; `do` carries out
    those that do more than interrupt.
    """

    fleet: Fleet
    files: Files
    plan: Sequence[Action]
    tell: Callable[[str], None] = lambda _: None
    do: Callable[[Action, MachineLife | None], None] | None = None
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    interruptions: list[SeenInterruption] = field(default_factory=list)
    _acted: float = field(default_factory=time.monotonic)

    @property
    def undone(self) -> list[str]:
        """The actions that have not been due so far."""
        return [f"{each.do} at {each.at}" for each in self.plan[self.done :]]

    def step(self, *, is_over: bool = False) -> bool:
        """Read the machines' progress, watch for the commit; return whether an action was due."""
        for life in self.fleet.running():
            life.read_metrics()
        self._watch_commit()
        if self.done == len(self.plan):
            return False
        action = self.plan[self.done]
        candidates: list[MachineLife | None] = [
            life for life in self.fleet.running() if life.ends_at is None
        ]
        for machine in candidates or ([] if action.is_to_machine else [None]):
            if action.is_due(self._seen(machine, is_over=is_over)):
                self.done += 1
                self.tell(f"{action.do} at {action.at}")
                if machine is not None and action.do in INTERRUPTIONS:
                    self._interrupt(action, machine)
                elif self.do is not None:
                    self.do(action, machine)
                self._acted = time.monotonic()
                return True
        return False

    def _seen(self, life: MachineLife | None, *, is_over: bool) -> Seen:
        seconds = time.monotonic() - self._acted
        if life is None:
            return Seen(seconds=seconds, is_over=is_over)
        # 0 until this machine has a snapshot of its own: others may be from the one before.
        of_all = sum(each.num_snapshots for each in self.fleet.lives.values())
        return Seen(
            line=life.latest,
            log=life.machine.log_lines(),
            num_snapshots=of_all if life.num_snapshots else 0,
            seconds=seconds,
            is_over=is_over,
        )

    def _interrupt(self, action: Action, life: MachineLife) -> None:
        self.interruptions.append(SeenInterruption(planned=action, life=life, at=time.monotonic()))
        self.fleet.interrupt(life, notice=action.do == "notice", seconds=action.seconds)

    def _watch_commit(self) -> None:
        if not self.interruptions or not self.interruptions[-1].notice:
            return
        interruption = self.interruptions[-1]
        if interruption.committed is None and interruption.life.ended is None:
            head = read_json(self.files, HEAD)
            if head is not None and is_safe(head, interruption.life.noticed):
                interruption.committed = time.monotonic()


def is_safe(head: Mapping[str, Any], noticed: Mapping[str, Any]) -> bool:
    """Whether the head shows that a machine has committed the progress that it had at its notice.

    It may continue training after that; with nothing to commit, it only releases the lease.
    """
    if head["state"] == "released":
        return True
    steps = [int(entry["step"]) for entry in head["checkpoints"]]
    return bool(noticed and steps) and max(steps) >= int(noticed["step"])


def steps_lost(interruption: SeenInterruption, resumes: Sequence[dict[str, Any]]) -> int:
    """Count the optimizer steps of the interrupted machine that its successor repeated.

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
