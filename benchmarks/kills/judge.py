"""What interruptions did to a script: read from the lines that it prints, a JSON object each.

`restored` (None where `torn`, several steps where `mismatched`), `step` with its sample `ids`,
`saving` and `saved` a step, `final` with a checksum; `at` is when. Other lines are passed over.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

Said = Mapping[str, Any]


def said_in(text: str) -> list[Said]:
    """The objects among the lines; an error that quotes one does not say it again."""
    found: list[Said] = []
    for line in text.splitlines():
        if line.startswith("{"):
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and "at" in said:
                    found.append(said)
    return found


@dataclass(kw_only=True, slots=True)
class Account:
    """A run through its lives: what was restored, lost, and consumed.

    Its clock counts the seconds of the work that stands: a restore sets it back.
    """

    torn: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)  # work that was done again, each kill
    lost_saves: list[float] = field(default_factory=list)  # of it, what a finished save had
    redone: int = 0  # steps
    final: str | None = None
    ids: dict[int, Sequence[Any]] = field(default_factory=dict)  # by step, what counted in the end
    _clock: float = 0.0
    _done: dict[int, float] = field(default_factory=dict)
    _saved: dict[int, float] = field(default_factory=dict)
    _is_killed: bool = False

    def live(self, said: Sequence[Said], name: str) -> None:
        """Take one life, killed or not; `name` is what its damage is told by."""
        began = said[0]["at"] if said else 0.0
        for one in said:
            at = self._clock + one["at"] - began
            if "restored" in one:
                self._restore(one, name)
            elif "step" in one:
                if self._is_killed:
                    self._go_on(one["step"] - 1)  # a script that does not say what it restored
                self._done[one["step"]] = at
                self.ids[one["step"]] = one.get("ids", ())
            elif "saved" in one:
                self._saved[one["saved"]] = at
            elif "final" in one:
                self.final = one["final"]
        if said:
            self._clock += said[-1]["at"] - began
        self._is_killed = True

    def samples(self, reference: "Account") -> tuple[int, int]:
        """Samples that were trained on more and less often than uninterrupted."""
        ours, theirs = (
            Counter(map(str, chain.from_iterable(run.ids.values()))) for run in (self, reference)
        )
        return (ours - theirs).total(), (theirs - ours).total()

    def _restore(self, one: Said, name: str) -> None:
        if one["restored"] is None:
            self.torn.append(f"{name}: {one['torn']}")
            return
        if one.get("mismatched"):
            self.mismatched.append(f"{name}: steps {one['mismatched']}")
        if self._is_killed:
            self._go_on(one["restored"])

    def _go_on(self, step: int) -> None:
        """From this step, which some life had done; what came after it is void."""
        last = max((at for done, at in self._done.items() if done <= step), default=0.0)
        kept = max((at for done, at in self._saved.items() if done <= step), default=0.0)
        self.lost.append(max(0.0, self._clock - last))
        voided = [at for done, at in self._saved.items() if done > step]
        self.lost_saves.append(max(voided, default=0.0) - max(last, kept) if voided else 0.0)
        self._clock = last
        self.redone += sum(done > step for done in self._done)
        for known in (self._done, self._saved, self.ids):
            for done in [done for done in known if done > step]:
                del known[done]
        self._is_killed = False
