"""The effects of interruptions on a program, read from its JSON lines.

They have `restored` (None if `torn`; steps if `mismatched`), `step` with its sample `ids`, `saving`
or `saved` with a step, or `final` with a checksum, and a time `at`. Other lines are ignored.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]


def recorded(path: Path, name: str) -> list[dict[str, Any]]:
    """Return the JSON objects with this name among a file's lines; half a line does not count."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        if line.startswith("{"):
            with suppress(ValueError):
                record = json.loads(line)
                if name in record:
                    found.append(record)
    return found


@dataclass(kw_only=True, slots=True)
class Account:
    """A run through its lives: its kills, and what was restored, lost, and consumed.

    Its clock counts the seconds of the work that stands: a restore sets it back.
    """

    kills: int = 0
    never_back: list[str] = field(default_factory=list)  # why, if it does not end
    torn: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)  # seconds of repeated work, by kill
    lost_saves: list[float] = field(default_factory=list)  # the part that a finished save had held
    final: str | None = None
    ids: dict[int, Sequence[Any]] = field(default_factory=dict)  # by step, as they finally counted
    _clock: float = 0.0
    _done: dict[int, float] = field(default_factory=dict)
    _saved: dict[int, float] = field(default_factory=dict)
    _is_killed: bool = False

    def live(self, reports: Sequence[Report], name: str) -> None:
        """Add one life, killed or not; `name` identifies it in reports of damage."""
        began = reports[0]["at"] if reports else 0.0
        for one in reports:
            at = self._clock + one["at"] - began
            if "restored" in one:
                self._restore(one, name)
            elif "step" in one:
                if self._is_killed:
                    self._go_on(one["step"] - 1)  # the script does not report what it restored
                self._done[one["step"]] = at
                self.ids[one["step"]] = one.get("ids", ())
            elif "saved" in one:
                self._saved[one["saved"]] = at
            elif "final" in one:
                self.final = one["final"]
        if reports:
            self._clock += reports[-1]["at"] - began
        self._is_killed = True

    def samples(self, reference: "Account") -> tuple[int, int]:
        """Return how many samples were trained on more often and less often than uninterrupted."""
        ours, theirs = (
            Counter(map(str, chain.from_iterable(run.ids.values()))) for run in (self, reference)
        )
        return (ours - theirs).total(), (theirs - ours).total()

    def _restore(self, one: Report, name: str) -> None:
        if one["restored"] is None:
            self.torn.append(f"{name}: {one['torn']}")
            return
        if one.get("mismatched"):
            self.mismatched.append(f"{name}: steps {one['mismatched']}")
        if self._is_killed:
            self._go_on(one["restored"])

    def _go_on(self, step: int) -> None:
        """Continue from this step, which an earlier life had done; later work is void."""
        last = max((at for done, at in self._done.items() if done <= step), default=0.0)
        kept = max((at for done, at in self._saved.items() if done <= step), default=0.0)
        self.lost.append(max(0.0, self._clock - last))
        voided = [at for done, at in self._saved.items() if done > step]
        self.lost_saves.append(max(voided, default=0.0) - max(last, kept) if voided else 0.0)
        self._clock = last
        for known in (self._done, self._saved, self.ids):
            for done in [done for done in known if done > step]:
                del known[done]
        self._is_killed = False
