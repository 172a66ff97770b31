"""Goodput: a run's paid seconds and dollars by cause, of which useful ones are the first.

The words that the plan forecasts, the receipt keeps, and every page and command shows. Whoever
computes them (sizing/plan/goodput.py, training/durable/record/goodput.py) gives all paid seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from contract.lineage import Line
from contract.readable import duration

USEFUL = "useful"
# No machine, so nothing is paid.
WAITING = "waiting"
# By cause, in the order in which a machine meets them: what it is called.
CAUSES: Mapping[str, str] = {
    USEFUL: "useful: steps that count, data prepared",
    WAITING: "waiting for capacity, unpaid",
    "boot": "boot, until the trainer has the run",
    "sync": "waiting for the dataset before the first step",
    "restore": "reading the last commit",
    "data_wait": "steps waiting for data",
    "saving": "saving while steps wait or slow down",
    "evaluation": "evaluation",
    "repeated": "steps that were lost or done again",
    "notice": "the rest of a notice, without steps",
    "idle": "after the trainer's end",
    "other": "models, exports, what nothing recorded",
}
# The alarm fires where a run's goodput falls below this share of its forecast.
LEAST_SHARE = 0.5
_PREFIX = "share_"


def useful_seconds(line: Line) -> tuple[float, float]:
    """Return the seconds of a step's line (or a prepared shard's) without and with data."""
    given, rate = line.get("seconds"), line.get("samples_per_second")
    seconds = given if given is not None else line.get("num_samples", 0) / rate if rate else 0.0
    waited = seconds * min(1.0, line.get("data_wait") or 0.0)
    return seconds - waited, waited


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineEnd:
    """Why one machine of a run ended: market, gpu, host, store, script, stopped, over or unknown.

    `restart_pays` is None where there is nothing to restart.
    """

    machine: str
    why: str
    evidence: str
    restart_pays: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """What the money bought: seconds and dollars by cause, and the plan's shares of a paid second.

    Where the price is unknown, `usd` is empty; without a plan, `planned`.
    """

    seconds: Mapping[str, float]
    usd: Mapping[str, float] = field(default_factory=dict)
    planned: Mapping[str, float] = field(default_factory=dict)
    ends: Sequence[MachineEnd] = ()

    @property
    def paid_seconds(self) -> float:
        """Seconds of all machines."""
        return sum(seconds for cause, seconds in self.seconds.items() if cause != WAITING)

    @property
    def share(self) -> float | None:
        """Useful seconds per paid second; None before a machine was paid for."""
        paid = self.paid_seconds
        return self.seconds.get(USEFUL, 0.0) / paid if paid else None

    def to_json(self) -> dict[str, Any]:
        """Return it for receipt.json, with the goodput itself; dollars add up to the bill."""
        kept = {
            "goodput": None if self.share is None else round(self.share, 4),
            "planned_goodput": self.planned.get(USEFUL),
        }
        return (
            kept
            | asdict(self)
            | {
                "seconds": _rounded(self.seconds, 3),
                "usd": _rounded(self.usd, 6),
            }
        )

    def rows(self) -> Iterator[tuple[str, str, float, float | None]]:
        """Yield each cause: its name, its figures as text, its share of paid time, the plan's."""
        paid, digits = self.paid_seconds or 1.0, _digits(sum(self.usd.values()))
        usd = _rounded(self.usd, digits)
        for cause, name in CAUSES.items():
            seconds, planned = self.seconds.get(cause, 0.0), self.planned.get(cause)
            if not (seconds or planned):
                continue
            text = f"{duration(seconds)}, {seconds / paid:.1%}"
            if cause in usd:
                text = f"${usd[cause]:.{digits}f}, {text}"
            if self.planned:
                text += f" (planned {planned or 0.0:.1%})"
            yield name, text, seconds / paid, planned

    def sentence(self) -> str:
        """Say it in one sentence: the goodput, the plan's, and what cost the most besides."""
        if self.share is None:
            return "nothing was paid for yet"
        text = f"{duration(self.paid_seconds)} of machines, {self.share:.0%} of it useful"
        if self.usd:
            usd = sum(self.usd.values())
            text = f"${usd:.{_digits(usd)}f} for {text}"
        if self.planned:
            text += f" (planned {self.planned.get(USEFUL, 0.0):.0%})"
        lost = {c: s for c, s in self.seconds.items() if c not in (USEFUL, WAITING) and s > 0}
        most = sorted(lost, key=lost.__getitem__)[:-3:-1]
        parts = [f"{CAUSES[cause]} {lost[cause] / self.paid_seconds:.0%}" for cause in most]
        return f"{text}; most of the rest: {', '.join(parts)}" if parts else text


def planned_words(shares: Mapping[str, float]) -> dict[str, float]:
    """Return a plan's shares under the names that they have in a run's prediction."""
    return {_PREFIX + cause: share for cause, share in shares.items()}


def planned_shares(prediction: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the shares that a run's prediction has; none in a run of an older version."""
    found = ((cause, (prediction or {}).get(_PREFIX + cause)) for cause in CAUSES)
    return {cause: share for cause, share in found if isinstance(share, float | int)}


def _digits(usd: float) -> int:
    """Return how many digits after the point show a bill: cents, or all of a small one."""
    return 2 if usd >= 1 else 4


def _rounded(values: Mapping[str, float], digits: int) -> dict[str, float]:
    """Round so that the sum of the rounded values is the rounded sum."""
    found, before = {}, 0.0
    for cause in (cause for cause in CAUSES if cause in values):
        after = before + values[cause]
        found[cause] = round(round(after, digits) - round(before, digits), digits)
        before = after
    return found
