"""What happens in mid-run, and when: the [[action]] tables of a drill."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rehearsal.aws.capacity import Course
from rehearsal.drill.interruptions import has_done
from rehearsal.faults import Fault
from rehearsal.scenarios.tables import check_choice

# To one machine, to AWS, and by whoever owns the run.
_TO_MACHINE = ("kill", "notice", "rebalance", "execute")
_DEEDS = (*_TO_MACHINE, "capacity", "faults", "clock", "guard", "operate", "deploy")
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
    seconds: float = 0.0  # since the action before, or the deploy
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What happens, and `at` which moment.

    STAGE:N of the run's progress, log:PATTERN of a line in a machine's log, after:SECONDS since the
    action before (or the deploy), or `ended`.
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
        return has_done(seen.line, name, int(value))


def _check_moment(at: str) -> None:
    name, _, value = at.partition(":")
    if at == ENDED or (name == LOG and value):
        re.compile(value)
        return
    number = r"\d+(\.\d+)?" if name == AFTER else r"\d+"
    if not re.fullmatch(r"\w+", name) or not re.fullmatch(number, value) or name == LOG:
        raise ValueError(f"at is {at!r}; give STAGE:N, log:PATTERN, after:SECONDS or {ENDED}")
