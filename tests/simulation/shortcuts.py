"""What the simulation does quicker than the code that it stands for, with the same result.

`test_simulation.py` lives through a seed with and without them. They leave out no decision: the
texts of a head and of a ledger are put together from those before, of heartbeats in a row between
which nobody acts the last alone is written, a request that meets no trouble is not prepared for
any, and records become dictionaries without copies of what never changes.
"""

import dataclasses
import gc
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter, is_
from typing import Any
from unittest import mock

import numpy as np

from contract.keys import HEAD
from sizing.fallback import decision
from stacks.guard.ledger import Ledger, MachineAttempt
from tests.simulation.clock import CLOCK, Event, sleep
from tests.simulation.versions import is_older
from training.durable.record.head import (
    _FORMAT,
    _WITHOUT_XXH128,
    CheckpointEntry,
    Head,
    new_nonce,
)
from training.durable.record.lease import Lease

_SHORTENED = ("training.", "sizing.", "stacks.guard.", "contract.", "tests.simulation.")
_ATOMS = frozenset([str, int, float, bool, bytes, type(None)])
_NAMES: dict[type, tuple[str, ...]] = {}
_SLOTS: dict[type, tuple[dict[str, Any], Callable[[Any], Any]]] = {}
_real_asdict, _real_replace = dataclasses.asdict, dataclasses.replace
real_table, real_bytes, _real_beat = decision.make_table, Head.to_bytes, Lease.beat
real_ledger, real_reading = Ledger.to_json, vars(Ledger)["from_json"].__func__
_real_start = Lease.start_heartbeat
_HEARTBEAT, _NONCE = vars(Head)["heartbeat"], vars(Head)["nonce"]


def quick_asdict(record: Any) -> dict[str, Any]:
    """Return what dataclasses.asdict does, but for atoms' copies."""
    kind = type(record)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(each.name for each in dataclasses.fields(record))
    found = {}
    for name in _NAMES[kind]:
        value = getattr(record, name)
        found[name] = value if type(value) in _ATOMS else _plain(value)
    return found


def quick_replace(record: Any, **changes: Any) -> Any:
    """Return what dataclasses.replace does for a record whose fields are all its own."""
    kind = type(record)
    slots = _SLOTS.get(kind)
    if slots is None:
        is_plain = hasattr(kind, "__slots__") and not hasattr(kind, "__post_init__")
        fields = dataclasses.fields(record) if is_plain else ()
        assert all(each.init for each in fields), kind
        puts = {each.name: getattr(kind, each.name).__set__ for each in fields}
        slots = _SLOTS[kind] = puts, attrgetter(*puts or ("__class__",))
    puts, values = slots
    if not puts or not changes.keys() <= puts.keys():
        return _real_replace(record, **changes)
    made = object.__new__(kind)
    for put, value in zip(puts.values(), values(record), strict=True):
        put(made, value)
    for name, value in changes.items():
        puts[name](made, value)
    return made


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {_plain(key): _plain(each) for key, each in value.items()} if value else {}
    if kind is list or kind is tuple:
        return kind([_plain(each) for each in value])
    if kind in _NAMES or dataclasses.is_dataclass(kind):
        return quick_asdict(value)
    return _real_asdict(_Holder(value))["value"]


@dataclasses.dataclass
class _Holder:
    value: Any


class HeadText:
    """A head's text, from the last one where only nonce and heartbeat differ."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[Any, ...], bytes, bytes]] = {}
        self._entries: dict[tuple[str, bool], tuple[CheckpointEntry, _Text]] = {}

    def to_bytes(self, head: Head) -> bytes:
        same = (
            head.generation, head.state, head.reason, head.weights_sha256, head.checkpoints,
            head.skipped_steps, head.unverified_by, head.run_id,
        )  # fmt: skip
        last = self._last.get(head.writer)
        if last is not None and all(map(is_, last[0], same)):
            middle = f'"nonce": "{head.nonce}",\n "heartbeat": {head.heartbeat}'
            return b"".join((last[1], middle.encode(), last[2]))
        text = self._whole(head)
        start, end = text.index(b'"nonce": "'), text.index(b',\n "state"')
        self._last[head.writer] = same, text[:start], text[end:]
        return text

    def _whole(self, head: Head) -> bytes:
        entries = head.checkpoints
        is_newest = any(file.xxh128 for entry in entries for file in entry.files)
        record = {"format": _FORMAT if is_newest else _WITHOUT_XXH128}
        record |= {name: getattr(head, name) for name in head.__slots__}
        record["checkpoints"] = [self._text_of(each, is_newest) for each in entries]
        return _indented(record).encode()

    def _text_of(self, entry: CheckpointEntry, is_newest: bool) -> "_Text":
        """A checkpoint's text stays the same."""
        known = self._entries.get((entry.name, is_newest))
        if known is None or known[0] is not entry:
            record = quick_asdict(entry)
            for file in () if is_newest else record["files"]:
                del file["xxh128"]
            known = self._entries[entry.name, is_newest] = entry, _Text(_indented(record, "\n  "))
        return known[1]


class _Text(str):
    """JSON that is put in as it is."""

    __slots__ = ()


def _indented(value: Any, line: str = "\n") -> str:
    """Return what json.dumps does with an indent of 1, which it does in Python."""
    kind = type(value)
    if kind is _Text:
        return str(value)
    if not value or kind not in (dict, list, tuple):
        return json.dumps(value)
    inner = f"{line} "
    if kind is dict:
        texts = [f"{json.dumps(name)}: {_indented(each, inner)}" for name, each in value.items()]
        return f"{{{inner}{f',{inner}'.join(texts)}{line}}}"
    return f"[{inner}{f',{inner}'.join([_indented(each, inner) for each in value])}{line}]"


class LedgerText:
    """A ledger's text from those of its attempts, and both back from a text that was made here.

    Most attempts have ended, and stay as they are. An older version's ledgers are left alone.
    """

    def __init__(self) -> None:
        self.read, self.write = vars(Ledger)["from_json"].__func__, Ledger.to_json
        self._attempts: dict[str, tuple[Any, str]] = {}
        self._written: dict[bytes, tuple[bytes, list[Any]]] = {}
        self._fresh: tuple[Any, bytes] | None = None  # nothing has changed it since it was read

    def from_json(self, kind: type[Ledger], data: bytes) -> Any:
        known = None if is_older() else self._written.get(data)
        if known is None:
            return self.read(kind, data)
        ledger = self.read(kind, known[0])
        ledger.attempts = {name: _attempt_of(*each) for name, each, _ in known[1]}
        self._fresh = ledger, data
        return ledger

    def to_json(self, ledger: Ledger) -> bytes:
        fresh, self._fresh = self._fresh, None
        if fresh is not None and fresh[0] is ledger:
            return fresh[1]
        if is_older():
            return bytes(self.write(ledger))
        found = [(name, *self._text_of(name, each)) for name, each in ledger.attempts.items()]
        texts = ", ".join([f"{json.dumps(name)}: {text}" for name, _, text in found])
        document = ledger.document()
        notes = [{name: getattr(note, name) for name in note.__slots__} for note in ledger.notes]
        bare = json.dumps({**document, "attempts": {}, "notes": notes})
        data = bare.replace('"attempts": {}', f'"attempts": {{{texts}}}', 1).encode()
        if len(self._written) > 100:
            self._written.clear()
        self._written[data] = bare.encode(), found
        return data

    def _text_of(self, name: str, attempt: MachineAttempt) -> tuple[Any, str]:
        values, known = _VALUES(attempt), self._attempts.get(name)
        if known is None or known[0] != (values, attempt.progress):
            record = {field: getattr(attempt, field) for field in attempt.__slots__}
            known = (values, {**attempt.progress}), json.dumps(record)
            self._attempts[name] = known
        return known


_FIELDS = tuple(name for name in MachineAttempt.__slots__ if name != "progress")
_VALUES = attrgetter(*_FIELDS)
_SETTERS = tuple(vars(MachineAttempt)[name].__set__ for name in _FIELDS)


def _attempt_of(values: tuple[Any, ...], progress: dict[str, int]) -> MachineAttempt:
    made = object.__new__(MachineAttempt)
    for put, value in zip(_SETTERS, values, strict=True):
        put(made, value)
    made.progress = {**progress}
    return made


class QuietBeats(Event):
    """What stops a heartbeat: it renews the lease itself where nobody else acts meanwhile.

    Nothing can then see that the lock was held, that the request was on its way, or, of several
    heartbeats in a row, any but the last.
    """

    def __init__(self, lease: Any) -> None:
        super().__init__()
        self._lease = lease

    def wait(self, timeout: float | None = None) -> bool:
        while not super().wait(timeout):
            if not beat_quietly(self._lease, timeout):
                return False
        return True


def beat_quietly(lease: Any, every: float | None = None) -> bool:
    """Renew a lease, with `every` again and again; return False where a real beat is due."""
    store, head = lease._store, lease._head
    world, luck, key = store._world, CLOCK.luck, store._prefix + HEAD
    latency, bucket = world.plan.latency, world.bucket
    most = math.exp(latency + 2.5)  # of 1e7 requests, few take longer
    if (
        head.state != "running"
        or lease.lost.is_set()
        or lease._unanswered
        or lease._lock.locked()
        or not CLOCK.is_alone_until(CLOCK.now + most)
        or not store.is_calm(8.0)
        or lease._etag != f'"{bucket.objects[key][-1].number}"'
        or bucket.objects[key][-1].data is None
    ):
        return False
    count, is_calm = 0, True
    while is_calm:
        nonce, seconds = new_nonce(), luck.lognormvariate(latency, 0.5)
        if is_long := seconds > most:
            break
        CLOCK.pass_by(seconds / 2)
        count, written, when = count + 1, nonce, CLOCK.now
        CLOCK.pass_by(seconds / 2)
        if every is None or not CLOCK.is_alone_until(CLOCK.now + every + most):
            break
        CLOCK.pass_by(every)
        is_calm = store.is_calm(8.0)
    if count:  # no copy of the head: nobody sees it before its answer has come
        _HEARTBEAT.__set__(head, head.heartbeat + count)
        _NONCE.__set__(head, written)
        lease._etag = bucket.renew(key, head.to_bytes(), when, count)
    if is_long:
        after = quick_replace(head, heartbeat=head.heartbeat + 1, nonce=nonce)
        sleep(seconds / 2)
        lease._etag = bucket.renew(key, after.to_bytes(), CLOCK.now)
        sleep(seconds / 2)
        lease._head = after
    store.patience.is_reached = True
    return is_calm


def _quick_beat(lease: Any) -> None:
    if not beat_quietly(lease):
        _real_beat(lease)


def _start_heartbeat(lease: Any) -> None:
    lease._stop = QuietBeats(lease)
    _real_start(lease)


class QuietPings(Event):
    """What stops a watchdog: it lets the pings pass at which nothing can have been silent enough.

    Silence is counted from a report, and what is allowed changes with a report only.
    """

    def __init__(self, watchdog: Any) -> None:
        super().__init__()
        self._watchdog, self._began, self._every = watchdog, 0.0, 1.0

    def wait(self, timeout: float | None = None) -> bool:
        watchdog, self._began, self._every = self._watchdog, CLOCK.now, timeout or 1.0
        limit = watchdog._limit_seconds
        quiet = min(limit, watchdog._last_beat + limit + watchdog._allowed_seconds - CLOCK.now)
        return super().wait(max(1, math.floor(quiet / self._every)) * self._every)

    def pause(self) -> None:
        """Ping next as if none had been passed over: the machine stands still from now on."""
        pings = math.ceil((CLOCK.now - self._began) / self._every)
        for task, token in self._waiters:
            CLOCK.wake(task, token, at=self._began + pings * self._every)


Row = np.ndarray[Any, Any]


def quick_table(
    loss: int,
    arrival: int,
    share: float,
    step_hours: float,
    change: float,
    *,
    reserve: int,
    return_reserve: int,
    units: int,
) -> tuple[decision.Values, ...]:
    """Return what the Guard's make_table does, row by row instead of number by number."""
    lost = -math.expm1(-(2 ** (loss / decision.RATES_PER_OCTAVE)) * step_hours)
    won = -math.expm1(-(2 ** (arrival / decision.RATES_PER_OCTAVE)) * step_hours)
    columns = np.arange(units + 2 + math.ceil(2 * change))
    late, hold = decision.LATE * columns * step_hours, columns * step_hours
    work, start = np.minimum(columns, 1) * step_hours, (columns + change) * step_hours
    whole, part = int(change), change - int(change)

    def shifted(row: Row) -> Row:
        padded = np.concatenate((row[whole:], np.full(whole + 1, row[-1])))
        return padded[:-1] + part * (padded[1:] - padded[:-1])

    def step(later: Row) -> Row:
        return np.concatenate(([later[0] + work[0]], later[:-1] + work[1:]))

    def capped(row: Row, forced: Row, safe: int) -> Row:
        return np.concatenate((row[:safe], forced[safe:]))

    idle, demand, spot, rows = (late, late), (late, late), late, []
    for left in range(1, decision.NUM_STEPS + 1):
        safe, tries = max(0, left - reserve + 1), max(0, left - return_reserve + 1)
        waits, runs = (
            tuple(a + chance * (b - a) for chance in (won, 1 - lost)) for a, b in (idle, demand)
        )
        waits = tuple(capped(row, start, safe) for row in waits)
        runs = tuple(capped(step(row), hold, tries) for row in runs)
        kept = np.concatenate((spot[:1], spot[:-1]))
        halves = np.concatenate((idle[0][:1], (idle[0][:-1] + idle[0][1:]) / 2))
        spot = (1 - lost) * kept + lost * halves + share * (1 - lost / 2) * work
        spot = capped(spot, start, safe)
        rows.append(decision.Values(wait=waits, run=runs, ride=spot))  # type: ignore[arg-type]
        leaves = waits[0], np.minimum(waits[1], shifted(spot))
        idle = tuple(map(np.minimum, leaves, map(shifted, runs)))
        demand = tuple(
            np.minimum(a, capped(b, hold, tries)) for a, b in zip(runs, leaves, strict=True)
        )
    return tuple(reversed(rows))


@contextmanager
def quick() -> Iterator[None]:
    """Context of all of them."""
    changed: list[tuple[Any, str, Callable[..., Any]]] = []
    for name, module in [*sys.modules.items()]:
        if name.startswith(_SHORTENED) and name != __name__:
            for key, value in [*vars(module).items()]:
                if value is _real_asdict:
                    changed.append((module, key, quick_asdict))
                if value is _real_replace:
                    changed.append((module, key, quick_replace))
    text, ledgers = HeadText(), LedgerText()
    patches = [mock.patch.object(*each) for each in changed]
    read = classmethod(lambda kind, data: ledgers.from_json(kind, data))
    patches.append(mock.patch.object(Ledger, "from_json", read))
    patches.append(mock.patch.object(Ledger, "to_json", lambda own: ledgers.to_json(own)))
    patches.append(mock.patch.object(Head, "to_bytes", lambda head: text.to_bytes(head)))
    patches.append(mock.patch.object(Lease, "beat", lambda lease: _quick_beat(lease)))
    start = mock.patch.object(Lease, "start_heartbeat", lambda lease: _start_heartbeat(lease))
    patches.append(start)
    patches.append(mock.patch.object(decision, "make_table", lru_cache(128)(quick_table)))
    for each in patches:
        each.start()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        for each in patches:
            each.stop()
