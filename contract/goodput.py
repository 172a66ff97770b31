"""Goodput: a run's paid seconds and dollars by cause, of which useful ones are the first.

The words that the plan forecasts (sizing/plan/goodput.py), the receipt keeps
(training/durable/record/goodput.py computes them) and every page and command shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from contract.lineage import Line
from contract.readable import duration

USEFUL = "useful"
WAITING = "waiting"  # without a machine, so nothing is paid
# By cause, in the order in which a machine meets them: what it is called.
CAUSES: Mapping[str, str] = {
    USEFUL: "useful: steps that count, made data",
    WAITING: "waiting for capacity, unpaid",
    "boot": "boot, until the trainer has the run",
    "sync": "waiting for the dataset before a step",
    "restore": "reading the last commit",
    "data_wait": "steps waiting for data",
    "saving": "saving: steps wait or slow down",
    "evaluation": "evaluation",
    "repeated": "steps that were lost or done again",
    "notice": "the rest of a notice, without steps",
    "idle": "after the trainer's end",
    "other": "stage starts, exports, the unrecorded",
}
# The alarm fires where a run's goodput falls below this share of its forecast.
LEAST_SHARE = 0.5
# Before a cause: its share of a paid second in a run's prediction.
PLANNED = "share_"


def useful_seconds(line: Line) -> tuple[float, float]:
    """Return a step's seconds (or a prepared shard's) without its wait for data, and that wait."""
    given, rate = line.get("seconds"), line.get("samples_per_second")
    seconds = given if given is not None else line.get("num_samples", 0) / rate if rate else 0.0
    waited = seconds * min(1.0, line.get("data_wait") or 0.0)
    return seconds - waited, waited


class MachineEnd(NamedTuple):
    """Why a machine ended: market, gpu, host, store, script, stopped, over (the run) or unknown."""

    machine: str
    why: str
    evidence: str
    restart_pays: bool | None  # None: there is nothing to restart

    def __str__(self) -> str:
        advice = {True: "a restart pays: ", False: "a restart fails again: ", None: ""}
        return f"{self.why}; {advice[self.restart_pays]}{self.evidence}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Seconds and dollars by cause (none where no price is known), and the plan's shares."""

    seconds: Mapping[str, float]
    usd: Mapping[str, float] = field(default_factory=dict)
    planned: Mapping[str, float] = field(default_factory=dict)
    ends: Sequence[MachineEnd] = ()

    @property
    def paid_seconds(self) -> float:
        """Seconds of all machines."""
        return sum(self.seconds.values()) - self.seconds.get(WAITING, 0.0)

    @property
    def share(self) -> float:
        """Useful seconds per paid second; 0 before a machine was paid for."""
        return self.seconds.get(USEFUL, 0.0) / (self.paid_seconds or 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return it for receipt.json; the rounded dollars add up to the bill."""
        return {
            "goodput": round(self.share, 4),
            "seconds": _rounded(self.seconds, 3),
            "usd": _rounded(self.usd, 6),
            "planned": dict(self.planned),
            "ends": [end._asdict() for end in self.ends],
        }

    def rows(self) -> Iterator[tuple[str, str, str, float, float]]:
        """Yield each cause with its name, its figures as text, its seconds, and those planned."""
        paid, usd = self.paid_seconds or 1.0, _rounded(self.usd, self._digits)
        for cause, name in CAUSES.items():
            seconds, planned = self.seconds.get(cause, 0.0), self.planned.get(cause)
            if seconds or planned:
                text = f"{duration(seconds)}, {seconds / paid:.1%}"
                if cause in usd:
                    text = f"${usd[cause]:.{self._digits}f}, {text}"
                if self.planned:
                    text += f" (planned {planned or 0.0:.1%})"
                yield cause, name, text, seconds, paid * (planned or 0.0)

    def sentence(self) -> str:
        """Say it in one sentence: the bill, the goodput, the plan's, what cost the most besides."""
        text = f"{duration(self.paid_seconds)} of machines, {self.share:.0%} of it useful"
        if self.usd:
            text = f"${sum(self.usd.values()):.{self._digits}f} for {text}"
        if self.planned:
            text += f" (planned {self.planned.get(USEFUL, 0.0):.0%})"
        lost = {c: s for c, s in self.seconds.items() if c not in (USEFUL, WAITING)}
        most = sorted(lost, key=lost.__getitem__)[:-3:-1]
        parts = [f"{CAUSES[cause]} {lost[cause] / self.paid_seconds:.0%}" for cause in most]
        return f"{text}; most of the rest: {', '.join(parts)}" if parts else text

    @property
    def _digits(self) -> int:
        return 2 if sum(self.usd.values()) >= 1 else 4


def _rounded(values: Mapping[str, float], digits: int) -> dict[str, float]:
    """Round so that the sum of the rounded values is the rounded sum."""
    found, before = {}, 0.0
    for cause in sorted(values, key=list(CAUSES).index):
        after = before + values[cause]
        found[cause] = round(round(after, digits) - round(before, digits), digits)
        before = after
    return found
