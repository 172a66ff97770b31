"""Notices, shutdowns and rebalance recommendations, and what is done in a notice's extra time.

Python's own signal handlers wait for the main thread (for 7 s, as measured during one long call
into torch), so the handlers here do nothing and `signal.set_wakeup_fd` wakes a thread. Imports no
torch.
"""

import contextlib
import json
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from contract.notice import Policy, exit_reserve, last_save_needs, save_reserve
from training.durable.errors import InterruptedRunError
from training.durable.record.head import is_waited_for
from training.durable.record.lease import Lease
from training.durable.store.protocol import Store

_Cause: TypeAlias = Literal["notice", "shutdown"]

# Two polls of the interruption handler, which writes the notice file, and its signal.
_HANDLER_SECONDS = 5.0

_CAUSES: dict[int, _Cause] = {
    signal.SIGUSR1: "notice",
    signal.SIGTERM: "shutdown",
    signal.SIGINT: "shutdown",
}


@dataclass(kw_only=True, slots=True)
class Notice:
    """The cause of an interruption, and its times on this process's monotonic clock.

    The deadline only ever comes nearer, for everyone who holds the notice.
    """

    cause: _Cause
    received: float
    deadline: float
    is_dated: bool = False  # the notice names the deadline; else it is the budget, an assumption

    @property
    def seconds(self) -> float:
        """Seconds from the notice to the end of the machine."""
        return self.deadline - self.received

    @property
    def seconds_left(self) -> float:
        """Seconds until the machine may be taken."""
        return self.deadline - time.monotonic()

    @property
    def save_by(self) -> float:
        """When each save must be over: the time after that is for ending the process."""
        return self.deadline - save_reserve(self.seconds)

    @property
    def exit_by(self) -> float:
        """When the process must begin to end."""
        return self.deadline - exit_reserve(self.seconds)

    def last_save_at(self, save_seconds: float, work_seconds: float = 0.0) -> float:
        """Return when work and the last save after it must begin, to be over safely in time."""
        return self.deadline - last_save_needs(
            work_seconds=work_seconds, save_seconds=save_seconds, notice_seconds=self.seconds
        )


class Interruption:
    """The notices and recommendations received so far; any thread may read them."""

    def __init__(self, *, budget_seconds: float, notice_file: Path | None = None) -> None:
        self.notice: Notice | None = None
        self.budget_seconds = budget_seconds
        self._notice_file = notice_file
        self._when_noticed: Callable[[Notice], None] | None = None
        # Two threads may record at once: the one that signals wake, and the main thread.
        self._lock = threading.Lock()
        self._noticed = threading.Event()
        self._rebalance = threading.Event()
        self.is_shutting_down = False  # asked to end, with or without a notice before
        self._writer: socket.socket | None = None
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers; a notice file that is already there counts as a notice."""
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_CAUSES, signal.SIGUSR2):
            # The wake-up descriptor has the signal; Python only needs a handler to be set.
            self._before[number] = signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._receive, args=(reader,), name="signals", daemon=True).start()
        if self._notice_file and self._notice_file.exists():
            self.record("notice")

    def close(self) -> None:
        """Restore the handlers; the thread ends with its socket."""
        if self._writer is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._writer.close()
        self._writer = None

    def record(self, cause: _Cause) -> None:
        """Record a notice or shutdown; the first sets the deadline, a later one may shorten it.

        A named time in the past is ignored: this machine runs, so a clock or the file is wrong, and
        the budget is the best guess.
        """
        if cause == "shutdown":
            self.is_shutting_down = True
        now, (named, since) = time.monotonic(), _seconds_in(self._notice_file)
        # The handler has the same clock, be it wrong: this process may hear of it much later.
        seconds = (self.budget_seconds, self.budget_seconds + since, named)
        left = min(each for each in seconds if each > 0)
        with self._lock:
            if self.notice is not None:
                self.notice.deadline = min(self.notice.deadline, now + left)
                return
            notice = Notice(cause=cause, received=now, deadline=now + left, is_dated=named > 0)
            self.notice, act = notice, self._when_noticed
        self._noticed.set()
        if act is not None:
            act(notice)

    def deadline(self) -> float:
        """Return when the machine ends, on the monotonic clock; infinity without a notice."""
        return math.inf if self.notice is None else self.notice.deadline

    def recommend_rebalance(self) -> None:
        """Ask for a save at the next step boundary."""
        self._rebalance.set()

    def when_noticed(self, act: Callable[[Notice], None]) -> None:
        """Call `act` in the receiving thread when a notice comes, or at once if one has."""
        with self._lock:
            self._when_noticed, notice = act, self.notice
        if notice is not None:
            act(notice)

    def wait(self, seconds: float) -> bool:
        """Sleep for up to `seconds`, but wake for a notice; return whether one came."""
        return self._noticed.wait(seconds)

    def heard_late(self) -> Notice | None:
        """Return the notice that a program, which looks for itself, may have heard before us."""
        before = self.notice
        if before is None and self._notice_file:
            self._noticed.wait(_HANDLER_SECONDS)
        late = self.notice
        # A shutdown that comes after its end cannot have caused that.
        return late if before or (late and late.cause == "notice") else None

    def take_rebalance(self) -> bool:
        """Return whether a rebalance was recommended since the last call."""
        if self._rebalance.is_set():
            self._rebalance.clear()
            return True
        return False

    def _receive(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(64):
                for number in numbers:
                    if number == signal.SIGUSR2:
                        self.recommend_rebalance()
                    elif number in _CAUSES:
                        self.record(_CAUSES[number])


def _seconds_in(notice_file: Path | None) -> tuple[float, float]:
    """Return the seconds until the notice's time, and until the handler heard; 0 without one."""
    record: Any = {}
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(notice_file.read_text()) if notice_file else {}
    return _seconds_until(record, "time"), _seconds_until(record, "received_at")


def _seconds_until(record: Any, name: str) -> float:
    try:
        when = datetime.fromisoformat(record[name])
    except (ValueError, KeyError, TypeError):
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return (when - datetime.now(UTC)).total_seconds()


_log = logging.getLogger(__name__)

_CANDIDATE_POLL_SECONDS = 2.0


class Saves:
    """The saves at a boundary during a notice; all ranks call each method.

    This class saves nothing, for work that publishes by itself, such as shards.
    """

    def begin(self) -> tuple[float, float]:
        """At the first boundary, return the seconds that a save now and a last one later take."""
        return 0.0, 0.0

    def commit(self, notice: Notice) -> float | None:
        """Save, keep the lease; return the seconds of a last save, or None if none can follow."""
        return 0.0

    def end(self, notice: Notice) -> None:
        """Save for the last time, and release the lease in the same write."""


class _Ranks(Protocol):
    """The agreement of the ranks (training/durable/attempt/world.py)."""

    def all_agree(self, is_in_favor: bool) -> bool:
        """Whether every rank is in favor."""

    def take_notice(self) -> Notice:
        """Return the notice, for the main thread to answer in place of the last resort."""

    def leave_to_last_resort(self, notice: Notice) -> None:
        """Have the last resort watch again: the main thread goes on with its work."""


class ExtraTime:
    """Decides if training continues after a notice's first commit, which makes the state safe.

    It does until a last save, as costly as the first, would only just end before the machine does.
    Each rank has its own, and they agree before they act.
    """

    def __init__(self, interruption: Interruption, policy: Policy) -> None:
        self._interruption = interruption
        self._policy = policy
        self._save_seconds: float | None = None
        # Leave the arithmetic to rank 0: this rank saves nothing, and may have no notice.
        self.follows = False
        # On rank 0, whose extra time ends early if a candidate waits for the lease.
        self.held: tuple[Store, Lease] | None = None
        self._ended = threading.Event()
        self.is_lease_wanted = False  # a candidate is waiting for it

    @property
    def is_granted(self) -> bool:
        """Whether training continues after a notice."""
        return self._save_seconds is not None

    @property
    def must_stop(self) -> bool:
        """Whether a notice or shutdown has come and no time is left for the work in progress."""
        if self._interruption.notice is None:
            return False
        return self._save_seconds is None or not self.would_allow(0.0, self._save_seconds)

    def close(self) -> None:
        """Stop, because the attempt ends."""
        self._ended.set()

    def watch_candidates(self) -> None:
        """On rank 0, have `is_lease_wanted` say from now on whether a candidate is waiting."""
        threading.Thread(target=self._watch, name="candidates", daemon=True).start()

    def answer(self, ranks: _Ranks, work_seconds: float | None, saves: Saves) -> None:
        """At a boundary during a notice, save what is due; InterruptedRunError on every rank unless
        the next work (None: of unknown duration) and the last save after it still fit.
        """
        if self._save_seconds is not None:
            if ranks.all_agree(self.would_allow(work_seconds, self._save_seconds)):
                return
            notice = ranks.take_notice()
            saves.end(notice)
        else:
            notice = ranks.take_notice()
            now, last = saves.begin()
            save_seconds = None
            if self.would_allow(work_seconds, last, now):
                save_seconds = saves.commit(notice)
            else:
                saves.end(notice)
            if ranks.all_agree(self.would_allow(work_seconds, save_seconds)):
                assert save_seconds is not None
                self._save_seconds = save_seconds
                if self.held is not None:
                    _log.info("[notice] safe, %.1f s left", notice.seconds_left)
                    self.watch_candidates()
                ranks.leave_to_last_resort(notice)
                return
        raise InterruptedRunError(notice.cause)

    def would_allow(
        self, work_seconds: float | None, save_seconds: float | None, first: float = 0.0
    ) -> bool:
        """Whether work, a last save after it, and `first` seconds before it still fit."""
        if self._interruption.is_shutting_down or work_seconds is None or save_seconds is None:
            return False
        if self.follows:
            return True
        notice = self._interruption.notice
        if notice is None or notice.cause != "notice" or not notice.is_dated:
            return False  # an end without a known time may come at any moment
        if self._policy == "stop" or self.is_lease_wanted:
            return False
        return time.monotonic() + first <= notice.last_save_at(save_seconds, work_seconds)

    def _watch(self) -> None:
        """Watch from a thread, until a candidate waits or the attempt ends."""
        assert self.held is not None
        store, lease = self.held
        while not is_waited_for(store, lease.head.generation):
            if self._ended.wait(_CANDIDATE_POLL_SECONDS):
                return
        _log.info("[notice] another machine is waiting for the lease")
        self.is_lease_wanted = True
