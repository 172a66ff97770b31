"""What happens in mid-run, and when: a demo's interruptions, and the [[action]] tables of a drill.

The trigger is the run's own progress, read from the metrics file of the machine that trains, so an
interruption comes at the same step on a fast laptop and on a slow one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rehearsal.aws.capacity import Course
from rehearsal.faults import Fault

SYNTAX = "kill:STAGE:N or notice:STAGE:N; of a program kill:program:STEP or kill:snapshot:N"
# To one machine, to AWS, and by whoever owns the run.
INTERRUPTIONS = ("kill", "notice")
_TO_MACHINE = (*INTERRUPTIONS, "rebalance", "execute")
_DEEDS = (*_TO_MACHINE, "capacity", "faults", "clock", "guard", "operate", "deploy")
# In place of a stage: what counts are the snapshots of a program that have been committed.
SNAPSHOT = "snapshot"
ENDED, AFTER, LOG = "ended", "after", "log"
# What a deed may be given, and what it cannot do without.
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
    """What tells whether a moment has come; `line` and `log` are those of one machine."""

    line: Mapping[str, Any] = field(default_factory=dict)  # of its metrics, the latest
    log: Sequence[str] = ()
    num_snapshots: int = 0  # of the run, once this machine has one of its own
    seconds: float = 0.0  # since the action before, or the deploy
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What happens, and `at` which moment.

    STAGE:N of the run's progress in steps or shards, snapshot:N of a program's, log:PATTERN of a
    line in a machine's log, after:SECONDS since the action before (or the deploy), or `ended`.
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
            raise ValueError(f"do = {self.do!r} needs a machine that runs: not at {ENDED!r}")
        for name, deeds in _FIELDS.items():
            is_given = getattr(self, name) not in ((), {}, "", None)
            if is_given and self.do not in deeds:
                raise ValueError(f"do = {self.do!r} takes no {name}; that is for {deeds[0]}")
            if not is_given and _NEEDED.get(self.do) == name:
                raise ValueError(f"do = {self.do!r} needs {name}")
        if self.do == "notice" and (self.seconds or 0) < 0:
            raise ValueError(f"the notice's seconds are {self.seconds}; give at least 0")

    def __str__(self) -> str:
        return f"{self.do}:{self.at}"

    @property
    def stage(self) -> str:
        """The stage, or the kind of moment, at which it comes."""
        return self.at.partition(":")[0]

    @property
    def is_to_machine(self) -> bool:
        """Whether it is done to one machine."""
        return self.do in _TO_MACHINE

    def is_due(self, seen: Seen) -> bool:
        """Whether the moment has come."""
        if self.at == ENDED or seen.is_over:
            return self.at == ENDED and seen.is_over
        name, _, value = self.at.partition(":")
        if name == AFTER:
            return seen.seconds >= float(value)
        if name == LOG:
            return any(re.search(value, line) for line in seen.log)
        if name == SNAPSHOT:
            return seen.num_snapshots >= int(value)
        # A preparation counts shards; a program's stage has no steps but its own.
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
    """Refuse an interruption in a stage that what is trained does not have: it would never come."""
    for planned in plan:
        if planned.stage not in stages:
            raise ValueError(
                f"the interruption {planned} is in stage {planned.stage!r}, which does not exist; "
                f"known are {', '.join(stages)}"
            )


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; give one of: {', '.join(known)}")


def _check_moment(at: str) -> None:
    name, _, value = at.partition(":")
    if at == ENDED or (name == LOG and value):
        re.compile(value)
        return
    number = r"\d+(\.\d+)?" if name == AFTER else r"\d+"
    if not re.fullmatch(r"[^:\s]+", name) or not re.fullmatch(number, value) or name == LOG:
        raise ValueError(f"at is {at!r}; give STAGE:N, log:PATTERN, after:SECONDS or {ENDED}")
