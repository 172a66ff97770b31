"""The kills of an attempt, and how they reach it: after some seconds, or at a point in its work.

A point is before or after a phase of the attempt, so windows of microseconds can be hit on
purpose. Each rank reports its phase to the parent in a small memory-mapped file, which survives the
process that wrote it.

A faulty store: errors, lost and late responses, conflicts, truncated bodies, a full disk.

It wraps any method of any store, so the shipped code itself is tested.
"""

import json
import logging
import mmap
import os
import random
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, Literal, TypeAlias, cast

from contract.keys import CONFIG, HEAD, RECEIPT
from training.durable import AnswerLostError, Store, StoreError, Upload

Side: TypeAlias = Literal["before", "after"]
# zombie: suspended, and resumed after a successor took over. rival: two attempts at once. held: a
# notice during work that reaches no step boundary in time, so that the staged copy is committed.
# dated: a notice with a time, so that training continues almost until the machine ends.
Kind: TypeAlias = Literal["kill", "term", "notice", "dated", "held", "zombie", "rival"]

SIGNALS: dict[Kind, Signals] = {
    "kill": Signals.SIGKILL,
    "term": Signals.SIGTERM,
    "notice": Signals.SIGUSR1,
    "dated": Signals.SIGUSR1,
    "held": Signals.SIGUSR1,
    "zombie": Signals.SIGSTOP,
    "rival": Signals.SIGKILL,
}
NOTICE_FILE = "notice.json"
_SLOT_BYTES = 64
_NUM_SLOTS = 6
_NUMBER = struct.Struct("<I")
# Longer than the budget of a notice that comes far from a step boundary.
_HELD_SECONDS = 3.0
# Under such a budget, work of this length is long enough for a copy to be staged.
_SLOW_SECONDS = 0.2
_NUM_SLOW = 2
# How long a rank waits for its own notice to arrive: a point that is planned must not be missed.
_ARRIVAL_SECONDS = 5.0
# Phases that start new work in the extra time of a notice; others finish what was started.
_WORK = ("preparation", "step", "evaluation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One kill: after some seconds, or before or after a phase.

    A phase is counted by its occurrences in the attempt; in a `stage`, the kill comes at the first
    one that the stage itself counts as the nth or later.
    """

    kind: Kind
    seconds: float | None = None
    phase: str | None = None
    side: Side = "before"
    stage: str = ""
    occurrence: int = 1
    target_rank: int | None = 0  # the rank that is signalled; None: all of them
    on_host: int = 0  # of a host: its number of ranks, the target being the first
    # The rank whose phases are counted; None: each, and the first one there signals itself.
    observed_rank: int | None = 0
    notice_seconds: float | None = None  # from the notice until the time that it names
    term_seconds: float | None = None  # from the notice until a SIGTERM
    kill_seconds: float | None = None  # until the machine ends, at the named time or sooner

    @property
    def follow_up(self) -> list[tuple[float, Signals]]:
        """Signals to send some seconds later, if the attempt has not ended."""
        later = ((self.term_seconds, Signals.SIGTERM), (self.kill_seconds, Signals.SIGKILL))
        return [(seconds, number) for seconds, number in later if seconds is not None]


class StatusFile:
    """A rank's status: the phases of its main and other threads, the number of store faults, the
    phase in which it was hit, its process, and whether it trained on after a notice.
    """

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        if not path.exists():
            path.write_bytes(bytes(_NUM_SLOTS * _SLOT_BYTES))
        with path.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), _NUM_SLOTS * _SLOT_BYTES)

    def write(self, slot: int, text: str) -> None:
        """Replace one line."""
        data = text.encode()[:_SLOT_BYTES].ljust(_SLOT_BYTES, b"\0")
        self._memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES] = data

    def read(self, slot: int) -> str:
        """Return one line, which may be empty."""
        data = self._memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]
        return bytes(data).rstrip(b"\0").decode(errors="replace")

    @property
    def phase(self) -> str:
        """The current phase: that of another thread, which is rarer, or else of the main thread."""
        return self.read(1) or self.read(0) or "start-up"

    def count_fault(self) -> None:
        """Add one injected fault."""
        _NUMBER.pack_into(self._memory, 2 * _SLOT_BYTES, self.num_faults + 1)

    @property
    def num_faults(self) -> int:
        """Faults injected so far."""
        return int(_NUMBER.unpack_from(self._memory, 2 * _SLOT_BYTES)[0])

    def report_hit(self, number: int, phase: str) -> None:
        """Record that the point of this kill was reached; an empty phase means nobody was there."""
        self.write(3, f"{number} {phase}" if phase else "")

    @property
    def hit(self) -> tuple[int, str] | None:
        """The number of the kill whose point was reached, and the phase."""
        number, _, phase = self.read(3).partition(" ")
        return (int(number), phase) if phase else None

    def begin(self, pid: int) -> None:
        """Record the rank's process."""
        _NUMBER.pack_into(self._memory, 4 * _SLOT_BYTES, pid)

    @property
    def pid(self) -> int:
        """The id of the rank's process; 0 before it starts."""
        return int(_NUMBER.unpack_from(self._memory, 4 * _SLOT_BYTES)[0])

    def report_extra_time(self) -> None:
        """Record that work was started in the extra time of a notice."""
        self.write(5, "extra")

    @property
    def has_used_extra_time(self) -> bool:
        """Whether work was started in the extra time of a notice."""
        return bool(self.read(5))


def send(kill: Kill, statuses: Sequence[StatusFile]) -> bool:
    """Signal the target rank, or all ranks at once; return whether it was there."""
    if kill.notice_seconds is not None:
        _write_notice(statuses[0].folder / NOTICE_FILE, kill.notice_seconds)
    return send_signal(SIGNALS[kill.kind], kill, statuses)


def send_signal(number: signal.Signals, kill: Kill, statuses: Sequence[StatusFile]) -> bool:
    """Send a signal to the kill's target; return whether it was there.

    A host is told to end through its first rank; a host that is lost takes all its ranks along.
    """
    leader, first = statuses[0].pid, kill.target_rank
    if first is None:
        return _signalled(leader, number, leader, os.killpg)
    last = first + (kill.on_host if number == signal.SIGKILL else 0)
    pids = [statuses[rank].pid for rank in range(first, max(last, first + 1))]
    pids.sort(key=lambda pid: pid == os.getpid())  # itself last
    were_there = [_signalled(pid, number, leader, os.kill) for pid in pids]
    return any(were_there)


def _signalled(
    pid: int, number: signal.Signals, leader: int, signal_it: Callable[[int, int], None]
) -> bool:
    """Signal a process that is still there: rank 0 leads a process group of all its ranks."""
    try:
        if not pid or os.getpgid(pid) != leader:
            return False
        signal_it(pid, number)
    except ProcessLookupError:
        return False
    return True


def _write_notice(path: Path, seconds: float) -> None:
    """Write the notice atomically, as a machine's guard does."""
    when = datetime.now(UTC) + timedelta(seconds=seconds)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"action": "terminate", "time": when.isoformat()}))
    part.rename(path)


@dataclass(slots=True)
class Injector:
    """Writes a rank's status, and sends the attempt's first kill whose point the rank reaches."""

    statuses: Sequence[StatusFile]
    rank: int
    kills: Sequence[Kill] = ()
    _: KW_ONLY
    is_in_extra_time: Callable[[], bool] = lambda: False
    is_noticed: Callable[[], bool] = lambda: True
    _counts: Counter[tuple[str, Side]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def status(self) -> StatusFile:
        """The rank's own."""
        return self.statuses[self.rank]

    @contextmanager
    def doing(self, phase: str, stage: str = "", number: int = 0) -> Iterator[None]:
        """Context of one phase of the attempt; `number` is the stage's own count of it, from 1."""
        slot = 0 if threading.current_thread() is threading.main_thread() else 1
        before = self.status.read(slot)
        self.status.write(slot, phase)
        if phase in _WORK and self.is_in_extra_time():
            self.status.report_extra_time()
        self._reach(phase, "before", stage, number)
        try:
            yield
            self._reach(phase, "after", stage, number)
        finally:
            self.status.write(slot, before)

    def _reach(self, phase: str, side: Side, stage: str, number: int) -> None:
        with self._lock:
            self._counts[phase, side] += 1
            occurrence = self._counts[phase, side]
        for index, kill in enumerate(self.kills):
            if (kill.phase, kill.side) != (phase, side):
                continue
            if kill.observed_rank not in (None, self.rank) or kill.stage not in ("", stage):
                continue
            left = kill.occurrence - (number if kill.stage else occurrence)
            if kill.kind == "held" and 0 < left <= _NUM_SLOW:
                time.sleep(_SLOW_SECONDS)
            if left == 0 or (kill.stage and left < 0):
                self._hit(index, kill, phase)

    def _hit(self, index: int, kill: Kill, phase: str) -> None:
        if kill.observed_rank is None:
            kill = replace(kill, target_rank=self.rank)
        try:
            # One attempt has one kill, though several ranks may reach its point.
            (self.status.folder / "hit").touch(exist_ok=False)
        except FileExistsError:
            return
        self.status.report_hit(index, phase)
        if not send(kill, self.statuses):
            self.status.report_hit(index, "")
        # The thread that handles the signal must have a chance to run.
        time.sleep(_HELD_SECONDS if kill.kind == "held" else 0.01)
        end = time.monotonic() + (_ARRIVAL_SECONDS if kill.stage else 0.0)
        while not self.is_noticed() and time.monotonic() < end:
            time.sleep(0.01)


_log = logging.getLogger(__name__)
# Possible faults of each kind of operation, with weights.
_CONDITIONAL = {"500": 2, "lost answer": 3, "409": 2, "late": 3, "slow": 2}
_WRITE = {"500": 3, "lost answer": 3, "late": 1, "disk full": 2, "slow": 2}
_PART = {"500": 3, "lost answer": 3, "disk full": 2, "slow": 2}
_READ = {"503": 2, "cut body": 3, "slow": 2}
_SLOW_CALL_SECONDS = 0.4

_KINDS = {
    "put_if": _CONDITIONAL,
    "put": _WRITE,
    "put_file": _WRITE,
    "put a part": _PART,
    "finish": _PART,
    "delete_below": _WRITE,
    "delete": _WRITE,
}

_FOLDERS = {
    "artifacts": "artifact",
    "checkpoints": "upload",
    CONFIG: "config",
    "events": "event",
    "final": "final weights",
    "metrics": "metrics",
    RECEIPT: "receipt",
}


def misbehaving(store: Store, injector: Injector, rate: float, seed: int) -> Store:
    """Return the store with faults in a share `rate` of its operations."""
    return cast(Store, _FaultyStore(store, injector, rate, seed))


class _FaultyStore:
    """Forwards every call, reports its phase, and injects faults into some calls."""

    def __init__(self, store: Store, injector: Injector, rate: float, seed: int) -> None:
        self._store = store
        self._injector = injector
        self._rate = rate
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._head: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        key = str(arguments[0] if arguments else next(iter(named.values()), ""))
        act = partial(act, *arguments, **named)
        if name == "upload":
            return _FaultyUpload(self, key, act)
        if name == "put_if" and key == HEAD:
            phase = self._head_phase(json.loads(arguments[1]))
        else:
            phase = _phase(name, key)
        return self.perform(name, key, phase, act, arguments[-1] if arguments else None)

    def perform(
        self, name: str, key: str, phase: str, act: Callable[[], Any], target: object = None
    ) -> Any:
        """Act, or inject a fault; `target` is what a read fills."""
        with self._injector.doing(phase):
            fault = self._draw(name)
            if fault is None:
                return act()
            self._injector.status.count_fault()
            _log.info(f"[fault] {fault}: {name} {key} ({phase})")
            return self._inject(fault, name, key, act, target)

    def _draw(self, name: str) -> str | None:
        with self._lock:
            if self._rng.random() >= self._rate:
                return None
            kinds = _KINDS.get(name, _READ)
            return self._rng.choices(list(kinds), weights=list(kinds.values()))[0]

    def _inject(
        self, fault: str, name: str, key: str, act: Callable[[], Any], target: object
    ) -> Any:
        lost = AnswerLostError if name == "put_if" else StoreError
        if fault == "slow":
            time.sleep(self._rng.uniform(0, _SLOW_CALL_SECONDS))
            return act()
        if fault == "lost answer":
            act()
        elif fault == "late":
            seconds = self._rng.uniform(0, _SLOW_CALL_SECONDS)
            threading.Thread(target=_later, args=(seconds, act), daemon=True).start()
        elif fault == "cut body" and name in ("get_file", "read_into"):
            act()
            _damage(target)
            if self._rng.random() < 0.5:
                return None  # undetected here: the checksum must detect it
        raise lost(f"{key}: {fault} (injected)")

    def _head_phase(self, head: dict[str, Any]) -> str:
        before, self._head = self._head, head
        if head["generation"] != before.get("generation"):
            return "take-over"
        if head["state"] != "running" and head["checkpoints"] == before["checkpoints"]:
            return {"finished": "finish", "released": "release"}.get(head["state"], "failure")
        return "heartbeat" if head["heartbeat"] != before["heartbeat"] else "publication"


class _FaultyUpload(Upload):
    """An upload with faults in its parts and its end."""

    def __init__(self, store: _FaultyStore, key: str, begin: Callable[[], Upload]) -> None:
        self._store = store
        self._key = key
        self._phase = _phase("put", key)
        self._upload: Upload = store.perform("put a part", key, self._phase, begin)
        self.is_fast = self._upload.is_fast

    def put(self, number: int, start: int, data: memoryview, digest: bytes) -> None:
        """Upload one part."""
        act = partial(self._upload.put, number, start, data, digest)
        self._store.perform("put a part", self._key, self._phase, act)

    def is_ready(self) -> bool:
        """Whether another process takes orders."""
        return self._upload.is_ready()

    def put_shared(self, *arguments: Any) -> Iterator[tuple[int, bytes]]:
        """Have another process upload every part."""
        sent = self._upload.put_shared(*arguments)
        yield from self._store.perform("put a part", self._key, self._phase, lambda: list(sent))

    def finish(self) -> None:
        """Finish the upload."""
        self._store.perform("finish", self._key, self._phase, self._upload.finish)

    def abort(self) -> None:
        """Discard what was uploaded."""
        self._upload.abort()


def _phase(name: str, key: str) -> str:
    folder = key.partition("/")[0]
    if name.startswith("delete"):
        return "retention"
    if name not in _KINDS:
        return "resume" if folder == "checkpoints" else "reading"
    return _FOLDERS.get(folder, "writing")


def _damage(target: object) -> None:
    """Truncate a file, or zero the second half of a buffer, as after a broken connection."""
    if isinstance(target, Path):
        with target.open("r+b") as stream:
            stream.truncate(target.stat().st_size // 2)
    elif isinstance(target, memoryview):
        half = len(target) // 2
        target[half:] = bytes(len(target) - half)


def _later(seconds: float, act: Callable[[], Any]) -> None:
    """Complete a delayed request; its errors reach nobody."""
    time.sleep(seconds)
    try:
        act()
    except (OSError, StoreError) as error:
        _log.info(f"[fault] late: {error}")
