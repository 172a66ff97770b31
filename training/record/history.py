"""A run's metrics and events, and its attempts reconstructed from them.

No torch.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from contract.keys import EVENTS, METRICS
from contract.lineage import Line, generation_of, newest_by_step, parse_lines
from training.store.protocol import Store

_ENDINGS = ("finished", "failed", "released", "diverged")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSummary:
    """One attempt, from its take-over to the last event heard from it."""

    generation: int
    writer: str
    began: datetime
    last_heard: datetime
    ended: str  # finished, failed, released, diverged, or silent: no event tells its end
    cause: str | None  # notice or shutdown, where one came
    seconds_to_commit: float | None  # from the notice to its first commit
    gained_steps: int  # trained in the rest of the notice, and committed
    first_step: int | None  # the first that it computed
    last_step: int | None
    num_repeated: int  # its steps that a later attempt computed again
    repeated_seconds: float
    usd_per_hour: float | None  # as given to the attempt

    @property
    def seconds(self) -> float:
        """Seconds from take-over to the last event."""
        return (self.last_heard - self.began).total_seconds()


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All metrics lines and events of a run, and what follows from them."""

    lines: Sequence[Line]
    events: Sequence[Line]
    steps: Mapping[int, Line]  # the lineage
    attempts: Sequence[AttemptSummary]

    def evaluations(self) -> dict[str, list[Line]]:
        """Stage -> its evaluations in order of steps, each once."""
        newest = newest_by_step(self.lines, "evaluation")
        found: dict[str, list[Line]] = {}
        for step in sorted(newest):
            found.setdefault(newest[step]["stage"], []).append(newest[step])
        return found

    def by_stage(self) -> dict[str, list[Line]]:
        """Stage -> the steps of its lineage, in order."""
        found: dict[str, list[Line]] = {}
        for step in sorted(self.steps):
            found.setdefault(self.steps[step]["stage"], []).append(self.steps[step])
        return found

    def gaps(self) -> list[float]:
        """Seconds between each attempt's end and its successor's take-over."""
        pairs = itertools.pairwise(self.attempts)
        return [max(0.0, (b.began - a.last_heard).total_seconds()) for a, b in pairs]

    @property
    def repeated_seconds(self) -> float:
        """Seconds of computing that were repeated."""
        return sum(attempt.repeated_seconds for attempt in self.attempts)


def read_history(store: Store) -> History:
    """Read all metrics and events of a run so far."""
    lines = list(read_lines(store, sorted(store.sizes(METRICS))))
    events = sorted(_events(store), key=lambda event: str(event["time"]))
    return History(
        lines=lines,
        events=events,
        steps=newest_by_step(lines, "step"),
        attempts=_attempts(lines, events),
    )


def read_lines(store: Store, keys: Iterable[str]) -> Iterator[Line]:
    """The lines of these metrics objects, in order."""
    for key in keys:
        found = store.get(key)
        if found is not None:
            yield from parse_lines(found.data)


def _events(store: Store) -> Iterator[Line]:
    for key in sorted(store.sizes(EVENTS)):
        found = store.get(key)
        if found is not None:
            yield json.loads(found.data)


def _attempts(lines: Sequence[Line], events: Sequence[Line]) -> list[AttemptSummary]:
    events = [event for event in events if event.get("source") == "trainer"]
    starts = [number for number, event in enumerate(events) if event["name"] == "take-over"]
    steps_of: dict[int, list[Line]] = {}
    lineage = newest_by_step(lines, "step")
    for line in lines:
        if line["kind"] == "step":
            steps_of.setdefault(generation_of(line), []).append(line)
    attempts = []
    for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
        first = events[start]
        # A stale writer's events may come after its successor's take-over.
        own = [e for e in events[start:end] if e["instance_id"] == first["instance_id"]]
        generation = int(first["generation"])
        attempts.append(_summary(generation, own, steps_of.get(generation, []), lineage))
    return attempts


def _summary(
    generation: int, events: Sequence[Line], steps: Sequence[Line], lineage: Mapping[int, Line]
) -> AttemptSummary:
    by_name = {event["name"]: event for event in events}
    notice = by_name.get("notice")
    commits = [event for event in events if event["name"] == "committed"]
    latencies = [e["notice_to_commit_seconds"] for e in commits if "notice_to_commit_seconds" in e]
    again = [line for line in steps if generation_of(lineage[line["step"]]) > generation]
    numbers = [line["step"] for line in steps]
    return AttemptSummary(
        generation=generation,
        writer=str(events[0]["instance_id"]),
        began=_time(events[0]),
        last_heard=_time(events[-1]),
        ended=next((name for name in _ENDINGS if name in by_name), "silent"),
        cause=notice["cause"] if notice else None,
        seconds_to_commit=latencies[0] if latencies else None,
        gained_steps=max((event.get("gained_steps", 0) for event in commits), default=0),
        first_step=min(numbers, default=None),
        last_step=max(numbers, default=None),
        num_repeated=len(again),
        usd_per_hour=events[0].get("usd_per_hour"),
        repeated_seconds=sum(
            len(line["ids"]) / line["samples_per_second"]
            for line in again
            if line["samples_per_second"]
        ),
    )


def _time(event: Line) -> datetime:
    return datetime.fromisoformat(str(event["time"]))
