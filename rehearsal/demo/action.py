"""Actions in mid-run: a demo's interruptions, and the [[action]] tables of a drill.

The run's own progress, read from the training machine's metrics file, triggers them, so that an
interruption comes at the same step on a fast laptop and on a slow one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embedded_aws import Course, Fault

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
    """Observations that tell whether an action is due; `line` and `log` are of one machine."""

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
