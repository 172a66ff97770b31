"""`runs logs`: boot, trainer and script of all machines as one stream, from the run's own record.

Only events have times; other lines come, in order, between their generation's take-over and end.
"""

import gzip
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from contract.keys import EVENTS, LOGS
from contract.readable import shown
from training.durable import History, Store, get_each

# One line for steps per this many seconds of training.
_STEP_SECONDS = 5.0
# Fields with which an event's line begins, or which its message repeats.
_NOT_SHOWN = {"time", "instance_id", "name", "status", "source", "message", "generation"}
# Events that come after all lines of their generation.
_ENDS = {"finished", "failed", "released", "program-ended", "program-failed", "take-over"}
Entry = Mapping[str, Any]


class RunLog:
    """A reader that yields each entry once; `new` yields those since the last call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._metrics = History.line_reader(store)
        self._seen: set[str] = set()  # events
        self._read: dict[str, tuple[int, int]] = {}  # part -> its bytes, characters yielded
        self._machines: dict[int, str] = {}
        self._generation = 0
        self._unshown = _STEP_SECONDS

    def new(self, *, is_last: bool = True) -> Iterator[Entry]:
        """Yield events, steps and printed lines in order, each with `machine` and `text`."""
        events = list(self._new_events())
        for event in events:
            if event["name"] == "take-over":
                self._machines[int(event["generation"])] = str(event["instance_id"])
        waiting: dict[int, deque[Entry]] = {}
        for line in chain(self._metrics.new(is_last=is_last), self._new_prints(is_last)):
            waiting.setdefault(int(line["generation"]), deque()).append(line)
        for event in events:
            lines = waiting.get(self._generation, deque())
            yield from self._shown(_taken_before(event, lines))
            if event["name"] == "take-over":
                self._generation = int(event["generation"])
            yield {"machine": event["instance_id"], "text": _event_text(event), **event}
        for generation in sorted(waiting):
            yield from self._shown(waiting[generation])

    def _shown(self, lines: Iterable[Entry]) -> Iterator[Entry]:
        for line in lines:
            if text := self._text(line):
                machine = self._machines.get(int(line["generation"]), "")
                yield {"machine": machine, **line, "text": text}

    def _text(self, line: Entry) -> str:
        """Return a readable line; "" if the events or the script already say it."""
        where = f"{line.get('stage')} step {line.get('step')}"
        if line["kind"] == "evaluation":
            values = ", ".join(f"{name} {value:.4g}" for name, value in line["metrics"].items())
            return f"{where}: evaluated: {values}"
        if line["kind"] != "step" or "num_samples" not in line:
            return str(line.get("text", ""))
        rate = float(line.get("samples_per_second") or 0.0)
        self._unshown += line["num_samples"] / rate if rate else _STEP_SECONDS
        if self._unshown < _STEP_SECONDS:
            return ""
        self._unshown = 0.0
        return f"{where}: loss {line.get('loss')}, {rate:,.0f} samples/s"

    def _new_events(self) -> Iterator[Entry]:
        keys = sorted(self._store.sizes(EVENTS).keys() - self._seen)
        self._seen.update(keys)
        for found in get_each(self._store, keys):
            if found and (event := History.event(found.data)):
                yield event

    def _new_prints(self, is_last: bool) -> Iterator[Entry]:
        """Yield what scripts have printed since; an incomplete line waits for its end."""
        sizes = self._store.sizes(LOGS)
        read = {key: self._read.get(key, (0, 0)) for key in sorted(sizes)}
        keys = [key for key, (size, _) in read.items() if is_last or size != sizes[key]]
        for key, found in zip(keys, get_each(self._store, keys), strict=True):
            text = gzip.decompress(found.data).decode(errors="replace") if found else ""
            generation = int(key.removeprefix(LOGS).partition("-")[0])
            end = len(text) if is_last else text.rfind("\n") + 1
            self._read[key] = sizes[key], end
            # Not splitlines: a progress bar's states are one line.
            for each in text[read[key][1] : end].removesuffix("\n").split("\n"):
                yield {"kind": "printed", "generation": generation, "text": each}


def _taken_before(event: Entry, lines: deque[Entry]) -> Iterator[Entry]:
    """Take those of its generation's lines that come before an event."""
    is_end, step = event["name"] in _ENDS, event.get("step")
    if not is_end and (event["name"] != "committed" or step is None):
        return
    while lines and (is_end or (lines[0]["kind"] != "printed" and lines[0].get("step", 0) <= step)):
        yield lines.popleft()


def _event_text(event: Entry) -> str:
    """Return an event's name, message and other fields."""
    status = "" if event.get("status") in (None, "info") else f" [{event['status']}]"
    parts = [str(event["message"])] if event.get("message") else []
    for name, value in event.items():
        if name not in _NOT_SHOWN and value not in (None, [], "", {}):
            parts.append(f"{name} {value}")
    return f"{event['name']}{status}: {', '.join(parts)}".removesuffix(": ")


def as_line(entry: Entry) -> str:
    """Return an entry as a readable line: time if it has one, machine, text."""
    time = f"{str(entry['time'])[:19]}Z".replace("T", " ") if "time" in entry else ""
    # Alone, as of a text that was redrawn only the end is left.
    columns = shown(f"{time:<20} {entry['machine']:<20}")
    return f"{columns} {shown(entry['text'])}"
