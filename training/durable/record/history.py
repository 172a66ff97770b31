"""A run's metrics and events, and its attempts reconstructed from them.

Step lines are read one by one into columns, some 60 bytes a step: a long run has half a million.
Imports neither torch nor numpy: marking a run failed writes a receipt, under any interpreter.
"""

import itertools
import json
import logging
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

from contract.goodput import USEFUL, useful_seconds
from contract.keys import EVENTS, METRICS
from contract.lineage import Line, newest_by_step
from contract.metrics import LineReader
from contract.trace import RunTrace
from training.durable.store.protocol import Store, get_each

_log = logging.getLogger(__name__)

_ENDINGS = ("finished", "failed", "released", "diverged")
_INTEGERS = ("step", "stage_step", "generation", "stage")
_NUMBERS = ("loss", "seconds", "gradient_norm", "waited")
_EVENT_INTEGERS = {"generation", "step", "gained_steps"}
_NAN = float("nan")
# Of one attempt's metrics lines with the same names: a page shows fewer points of a curve.
_MOST_METRICS = 4000
# By kind of line and field: the cause that these seconds have.
_TIMED: Mapping[str, Mapping[str, str]] = {
    "commit": {"blocked_seconds": "saving", "slowed_seconds": "saving"},
    "evaluation": {"seconds": "evaluation"},
    "prepare": {"seconds": USEFUL},
}
_SecondsBy: TypeAlias = dict[int, dict[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """Steps, ordered by their number; each column has one value per step."""

    columns: Mapping[str, "array[Any]"]
    stages: tuple[str, ...]  # the column `stage` has indices into it

    def __len__(self) -> int:
        return len(self["step"])

    def __getitem__(self, name: str) -> "array[Any]":
        return self.columns[name]

    def take(self, rows: Iterable[int]) -> "_Steps":
        """Return the steps in these rows."""
        kept = array("q", rows)
        columns = {
            name: array(column.typecode, map(column.__getitem__, kept))
            for name, column in self.columns.items()
        }
        return _Steps(columns=columns, stages=self.stages)

    def by_stage(self) -> "dict[str, _Steps]":
        """Return stage -> its steps."""
        rows: dict[int, array[int]] = {}
        for row, stage in enumerate(self["stage"]):
            rows.setdefault(stage, array("q")).append(row)
        return {self.stages[stage]: self.take(kept) for stage, kept in rows.items()}


@dataclass(kw_only=True, slots=True)
class _AttemptSteps:
    """The steps that one attempt computed."""

    first: int
    last: int
    num_repeated: int = 0  # only a later line of these counts
    seconds_by: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class _StepLines:
    """Collects step lines, generation by generation; the last line of each step counts."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {
            **{name: array("q") for name in _INTEGERS},
            **{name: array("d") for name in _NUMBERS},
        }
        self._stages: dict[str, int] = {}

    def add(self, line: Line) -> None:
        """Add a line; missing numbers become NaN. OverflowError for an impossible step."""
        stage = self._stages.setdefault(line["stage"], len(self._stages))
        row = line["step"], line.get("stage_step", line["step"]), line["generation"], stage
        useful, waited = useful_seconds(line)
        seconds = useful + waited or _NAN
        numbers = _number(line.get("loss")), seconds, _number(line.get("gradient_norm")), waited
        # All or none: the columns must stay equally long.
        values = (*array("q", row), *numbers)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def split(self) -> tuple[_Steps, dict[int, _AttemptSteps]]:
        """Return the lineage, and generation -> what it computed."""
        lines = _Steps(columns=self._columns, stages=tuple(self._stages))
        attempts: dict[int, _AttemptSteps] = {}
        for generation, step in zip(lines["generation"], lines["step"], strict=True):
            own = attempts.setdefault(generation, _AttemptSteps(first=step, last=step))
            own.first, own.last = min(own.first, step), max(own.last, step)
        kept = array("q")
        steps = lines["step"]
        rows = sorted(range(len(steps)), key=steps.__getitem__)
        for row, following in itertools.zip_longest(rows, rows[1:]):
            own, seconds = attempts[lines["generation"][row]], lines["seconds"][row]
            seconds, waited = 0.0 if seconds != seconds else seconds, lines["waited"][row]
            if following is None or steps[row] != steps[following]:
                kept.append(row)
                own.seconds_by[USEFUL] += seconds - waited
                # Before its first step it waits for data that may still arrive.
                own.seconds_by["sync" if steps[row] == own.first else "data_wait"] += waited
                continue
            own.num_repeated += 1
            own.seconds_by["repeated"] += seconds
        return lines.take(kept), attempts


class _OtherLines:
    """Lines of other kinds; of those that a program goes on writing, as many as are used.

    Of what a loss would cost, the last; of metrics with the same names, the last of each stretch.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], dict[int, tuple[int, Line]]] = {}  # by stretch
        self._stretch: dict[tuple[Any, ...], int] = defaultdict(lambda: 1)

    def add(self, number: int, line: Line) -> None:
        """Add the run's line of this number."""
        kind, values = line["kind"], line.get("values")
        key = line["generation"], kind, *(values if isinstance(values, dict) else ())
        kept = self._kept.setdefault(key, {})
        kept[0 if kind == "running" else number // self._stretch[key]] = number, line
        if kind == "metrics" and len(kept) > _MOST_METRICS:
            self._stretch[key] *= 2
            self._kept[key] = {one[0] // self._stretch[key]: one for one in kept.values()}

    def in_order(self) -> list[Line]:
        """Return what was kept, in the order in which it was added."""
        found = itertools.chain.from_iterable(each.values() for each in self._kept.values())
        return [line for _, line in sorted(found, key=itemgetter(0))]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else _NAN


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSummary:
    """One attempt, from its take-over to the last event heard from it."""

    generation: int
    writer: str
    began: datetime
    last_heard: datetime
    ended: str  # finished, failed, released, diverged, or silent: no event shows how
    cause: str | None  # notice or shutdown, where one came
    seconds_to_commit: float | None  # from the notice to its first commit
    gained_steps: int  # trained in the rest of the notice, and committed
    first_step: int | None  # the first that it computed
    last_step: int | None
    num_repeated: int  # its steps that a later attempt computed again
    repeated_seconds: float
    usd_per_hour: float | None  # as passed to the attempt
    ranks: int | None  # that trained; None for a program, or an older version
    last_commit: Line | None = None  # the event
    seconds_by: Mapping[str, float] = field(default_factory=dict)  # what its lines measured

    @property
    def seconds(self) -> float:
        """Seconds from take-over to the last event."""
        return (self.last_heard - self.began).total_seconds()


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The record in a run's metrics lines and events."""

    lines: Sequence[Line]  # of other kinds than "step"; of a program's reports, not all
    steps: _Steps  # the lineage
    attempts: Sequence[AttemptSummary]
    passed_over: Sequence[str]  # damaged objects and lines
    events: Sequence[Line] = ()  # all of them, by their machines' clocks

    @classmethod
    def read(cls, store: Store) -> "History":
        """Read all metrics and events so far; pass over what is damaged, with a warning."""
        reader, steps, others = cls.line_reader(store), _StepLines(), _OtherLines()
        for number, line in enumerate(reader.new()):
            if line["kind"] != "step":
                others.add(number, line)
                continue
            try:
                steps.add(line)
            except (OverflowError, TypeError):
                reader.passed_over.append(f"the damaged line of step {line['step']}")
        lineage, computed = steps.split()
        passed_over = reader.passed_over
        events = sorted(_events(store, passed_over), key=lambda event: str(event["time"]))
        for what in passed_over:
            _log.warning(f"[history] passed over {what}")
        lines = others.in_order()
        attempts = _attempts(computed, events, _measured(lines, computed))
        return cls(
            lines=lines, steps=lineage, attempts=attempts, passed_over=passed_over, events=events
        )

    @staticmethod
    def line_reader(store: Store) -> LineReader:
        """Return a reader of the run's metrics lines."""

        return LineReader(lambda: store.sizes(METRICS), partial(_contents, store))

    @staticmethod
    def trace(store: Store) -> RunTrace:
        """Return what the run left, for the rules that it keeps."""
        return RunTrace.read(store.sizes, partial(_contents, store))

    @staticmethod
    def event(data: bytes) -> Line | None:
        """An event that has what its readers take for granted; None for a damaged one."""
        try:
            event = json.loads(data)
            is_whole = _time(event).tzinfo and all(event[name] for name in ("name", "instance_id"))
            needed = ["generation"] if event["name"] == "take-over" else []
            integers = [event[name] for name in (*needed, *_EVENT_INTEGERS & event.keys())]
        except (ValueError, KeyError, TypeError):
            return None
        is_typed = type(event["name"]) is str and all(type(each) is int for each in integers)
        return event if is_whole and is_typed else None

    def evaluations(self) -> dict[str, list[Line]]:
        """Return stage -> its evaluations in order of steps, each once."""
        newest = newest_by_step(self.lines, "evaluation")
        found: dict[str, list[Line]] = {}
        for step in sorted(newest):
            found.setdefault(newest[step]["stage"], []).append(newest[step])
        return found

    def unsaved(self) -> dict[int, float | None]:
        """Return generation -> a program's seconds that no snapshot had at its end, if known."""
        last = {
            int(line["generation"]): line
            for line in self.lines
            if line["kind"] in ("running", "ended")
        }
        found: dict[int, float | None] = {}
        for attempt in self.attempts:
            line, commit = last.get(attempt.generation, {}), attempt.last_commit or {}
            lost = line.get("unsaved_seconds")
            # The last line may be from before the last commit.
            if "written_at" in commit and commit["step"] > line.get("snapshot", 0):
                lost = max(0.0, attempt.last_heard.timestamp() - commit["written_at"])
            found[attempt.generation] = None if lost is None else round(float(lost), 3)
        return found


def _contents(store: Store, keys: Sequence[str]) -> Iterator[bytes | None]:
    for found in get_each(store, keys):
        yield found.data if found else None


def _events(store: Store, passed_over: list[str]) -> Iterator[Line]:
    keys = sorted(store.sizes(EVENTS))
    for key, found in zip(keys, get_each(store, keys), strict=True):
        if found is None:
            continue
        if (event := History.event(found.data)) is None:
            passed_over.append(f"{key}: damaged")
        else:
            yield event


def _attempts(
    computed: Mapping[int, _AttemptSteps], events: Sequence[Line], measured: _SecondsBy
) -> list[AttemptSummary]:
    # A run may be reopened a day later, under the name of the machine that trained.
    events = [
        event
        for event in events
        if event.get("source") == "trainer" and event["name"] != "reopened"
    ]
    starts = [number for number, event in enumerate(events) if event["name"] == "take-over"]
    attempts = []
    for start, end in itertools.pairwise([*starts, len(events)]):
        first = events[start]
        # A stale writer's events may come after its successor's take-over.
        own = [e for e in events[start:end] if e["instance_id"] == first["instance_id"]]
        generation = int(first["generation"])
        attempts.append(_summary(generation, own, computed.get(generation), measured[generation]))
    return attempts


def _summary(
    generation: int,
    events: Sequence[Line],
    steps: _AttemptSteps | None,
    seconds_by: Mapping[str, float],
) -> AttemptSummary:
    by_name = {event["name"]: event for event in events}
    notice = by_name.get("notice")
    commits = [event for event in events if event["name"] == "committed"]
    latencies = [e["notice_to_commit_seconds"] for e in commits if "notice_to_commit_seconds" in e]
    return AttemptSummary(
        generation=generation,
        writer=str(events[0]["instance_id"]),
        began=_time(events[0]),
        last_heard=_time(events[-1]),
        ended=next((name for name in _ENDINGS if name in by_name), "silent"),
        cause=notice.get("cause") if notice else None,
        seconds_to_commit=latencies[0] if latencies else None,
        gained_steps=max((event.get("gained_steps", 0) for event in commits), default=0),
        first_step=steps.first if steps else None,
        last_step=steps.last if steps else None,
        num_repeated=steps.num_repeated if steps else 0,
        repeated_seconds=seconds_by.get("repeated", 0.0),
        usd_per_hour=events[0].get("usd_per_hour"),
        ranks=events[0].get("ranks"),
        last_commit=by_name.get("committed"),
        seconds_by=seconds_by,
    )


def _measured(lines: Iterable[Line], computed: Mapping[int, _AttemptSteps]) -> _SecondsBy:
    """Return generation -> the seconds that its lines measured, by cause (contract/goodput.py)."""
    found: _SecondsBy = defaultdict(lambda: defaultdict(float))
    for generation, steps in computed.items():
        found[generation].update(steps.seconds_by)
    for line in lines:
        for name, cause in _TIMED.get(line["kind"], {}).items():
            if isinstance(value := line.get(name), int | float):
                own = found[line["generation"]]
                if name == "slowed_seconds":  # within the steps
                    value = min(value, own[USEFUL])
                    own[USEFUL] -= value
                own[cause] += value
    return found


def _time(event: Line) -> datetime:
    return datetime.fromisoformat(str(event["time"]))
