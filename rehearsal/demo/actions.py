"""A rehearsed run: the actions on it, one after the other, and the cost of its interruptions."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.keys import HEAD
from embedded_aws import Course, Fault
from rehearsal.demo.fleet import Fleet, MachineLife
from rehearsal.demo.run_files import Files, read_json

SYNTAX = "kill:STAGE:N or notice:STAGE:N; for a program kill:program:STEP or kill:snapshot:N"
# What is done to one machine, to AWS, and by the run's owner.
INTERRUPTIONS = ("kill", "notice")
_TO_MACHINE = (*INTERRUPTIONS, "rebalance", "execute")
_DEEDS = (*_TO_MACHINE, "capacity", "faults", "clock", "guard", "operate", "deploy")
# In place of a stage: counts a program's committed snapshots.
SNAPSHOT = "snapshot"
ENDED, AFTER, LOG = "ended", "after", "log"
# Which actions may have a field, and which need it.
_FIELDS = {
    "capacity": ("capacity",),
    "parameters": ("deploy",),
    "faults": ("faults",),
    "command": ("execute", "operate"),
    "seconds": ("notice", "clock"),
}
_NEEDED = {"capacity": "capacity", "execute": "command", "operate": "command", "clock": "seconds"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Observations that decide whether an action is due; `line` and `log` are of one machine."""

    line: Mapping[str, Any] = field(default_factory=dict)  # its latest metrics line
    log: Sequence[str] = ()
    num_snapshots: int = 0  # of the run, once this machine has one of its own
    seconds: float = 0.0  # since the previous action, or the deploy
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """An action (`do`), and the moment `at` which it is due.

    A moment is STAGE:N (progress in steps or shards), snapshot:N (of a program), log:PATTERN (a
    line in a machine's log), after:SECONDS (since the previous action or the deploy), or `ended`.
    """

    at: str
    do: str
    capacity: tuple[Course, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    command: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_choice("do", self.do, _DEEDS)
        _check_moment(self.at)
        if self.at == ENDED and self.is_to_machine:
            raise ValueError(f"do = {self.do!r} needs a running machine: not at {ENDED!r}")
        for name, deeds in _FIELDS.items():
            is_given = getattr(self, name) not in ((), {}, "", None)
            if is_given and self.do not in deeds:
                raise ValueError(f"do = {self.do!r} takes no {name}; that is for {deeds[0]}")
            if not is_given and _NEEDED.get(self.do) == name:
                raise ValueError(f"do = {self.do!r} needs {name}")
        if self.do == "notice" and (self.seconds or 0) < 0:
            raise ValueError(f"the notice's seconds are {self.seconds}; use 0 or more")

    def __str__(self) -> str:
        return f"{self.do}:{self.at}"

    @property
    def stage(self) -> str:
        """The stage, or the kind of moment, at which it is due."""
        return self.at.partition(":")[0]

    @property
    def is_to_machine(self) -> bool:
        """Whether it is done to one machine."""
        return self.do in _TO_MACHINE

    def is_due(self, seen: Seen) -> bool:
        """Whether the action is due."""
        if self.at == ENDED or seen.is_over:
            return self.at == ENDED and seen.is_over
        name, _, value = self.at.partition(":")
        if name == AFTER:
            return seen.seconds >= float(value)
        if name == LOG:
            return any(re.search(value, line) for line in seen.log)
        if name == SNAPSHOT:
            return seen.num_snapshots >= int(value)
        # A Prepare stage counts shards; a program has no steps other than its stage's.
        line = seen.line
        done = line.get("stage_step", line.get("done", line.get("step", 0)))
        return line.get("stage") == name and int(done) >= int(value)


def parse_interruption(text: str) -> Action:
    """Read `kill:head:60` or `notice:head:150`."""
    match = re.fullmatch(r"(kill|notice):([^:\s]+:\d+)", text)
    if match is None:
        raise ValueError(f"an interruption is {SYNTAX}, got {text!r}")
    return Action(do=match[1], at=match[2])


def check_stages(plan: Sequence[Action], stages: Sequence[str]) -> None:
    """Refuse an interruption in a stage that does not exist, where it would never be due."""
    for planned in plan:
        if planned.stage not in stages:
            raise ValueError(
                f"the interruption {planned} is in stage {planned.stage!r}, which does not exist; "
                f"known are {', '.join(stages)}"
            )


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse an unknown value."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; use one of: {', '.join(known)}")


def _check_moment(at: str) -> None:
    name, _, value = at.partition(":")
    if at == ENDED or (name == LOG and value):
        re.compile(value)
        return
    number = r"\d+(\.\d+)?" if name == AFTER else r"\d+"
    if not re.fullmatch(r"[^:\s]+", name) or not re.fullmatch(number, value) or name == LOG:
        raise ValueError(f"at is {at!r}; use STAGE:N, log:PATTERN, after:SECONDS or {ENDED}")


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

    `files` are what the run publishes. `say` gets a line before each action; `do` carries out
    those that do more than interrupt.
    """

    fleet: Fleet
    files: Files
    plan: Sequence[Action]
    say: Callable[[str], None] = lambda _: None
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
                self.say(f"{action.do} at {action.at}")
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
