"""Notices, shutdowns and rebalance recommendations, received by a thread that signals wake.

Python's own signal handlers wait for the main thread (7 s late was measured during one long call
into torch), so the handlers here do nothing and `signal.set_wakeup_fd` wakes a thread. Imports no
torch.
"""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

from contract.notice import exit_reserve, last_save_needs, save_reserve

_Cause: TypeAlias = Literal["notice", "shutdown"]

_CAUSES: dict[int, _Cause] = {
    signal.SIGUSR1: "notice",
    signal.SIGTERM: "shutdown",
    signal.SIGINT: "shutdown",
}


class InterruptedRunError(RuntimeError):
    """The attempt stops: raised only at step boundaries, between evaluation batches or shards."""


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
        """When each save must be over: what is left then belongs to the end of the process."""
        return self.deadline - save_reserve(self.seconds)

    @property
    def exit_by(self) -> float:
        """When the process must begin to end."""
        return self.deadline - exit_reserve(self.seconds)

    def last_save_at(self, save_seconds: float, work_seconds: float = 0.0) -> float:
        """When work and the last save after it must begin, to be safely over in time."""
        return self.deadline - last_save_needs(
            work_seconds=work_seconds, save_seconds=save_seconds, notice_seconds=self.seconds
        )

    def shorten(self, deadline: float) -> None:
        """Move the deadline if that one is nearer."""
        self.deadline = min(self.deadline, deadline)


class Interruption:
    """The notices and recommendations received so far; any thread may read them."""

    def __init__(self, *, budget_seconds: float, notice_file: Path | None = None) -> None:
        self.notice: Notice | None = None
        self.budget_seconds = budget_seconds
        self._notice_file = notice_file
        self._when_noticed: Callable[[Notice], None] | None = None
        # Two threads may tell at once: the one that signals wake, and the main thread.
        self._lock = threading.Lock()
        self._pending = threading.Event()
        self._shutdown = threading.Event()
        self._rebalance = threading.Event()
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers; a notice file that is already there counts as a notice."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_CAUSES, signal.SIGUSR2):
            self._before[number] = signal.signal(number, _do_nothing)
        threading.Thread(target=self._receive, name="signals", daemon=True).start()
        if self._notice_file and self._notice_file.exists():
            self.tell("notice")

    def close(self) -> None:
        """Restore the handlers; the thread ends with its socket."""
        if self._writer is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._writer.close()
        self._writer = None

    def tell(self, cause: _Cause) -> None:
        """Record a notice or shutdown; the first sets the deadline, a later one may shorten it.

        A named time that has passed counts as none: this machine runs, so a clock or the file is
        wrong, and the budget is the best guess.
        """
        if cause == "shutdown":
            self._shutdown.set()
        now, named = time.monotonic(), _seconds_in(self._notice_file)
        if named is not None and named <= 0:
            named = None
        left = self.budget_seconds if named is None else min(self.budget_seconds, named)
        with self._lock:
            if self.notice is not None:
                self.notice.shorten(now + left)
                return
            notice = Notice(
                cause=cause, received=now, deadline=now + left, is_dated=named is not None
            )
            self.notice, act = notice, self._when_noticed
        self._pending.set()
        if act is not None:
            act(notice)

    def recommend_rebalance(self) -> None:
        """Ask for a save at the next step boundary."""
        self._rebalance.set()

    def when_noticed(self, act: Callable[[Notice], None]) -> None:
        """Call `act` in the receiving thread when a notice comes, or at once if one has."""
        with self._lock:
            self._when_noticed, notice = act, self.notice
        if notice is not None:
            act(notice)

    @property
    def is_pending(self) -> bool:
        """Whether a notice or shutdown has come."""
        return self._pending.is_set()

    @property
    def is_shutting_down(self) -> bool:
        """Whether the process was told to end, with or without a notice before."""
        return self._shutdown.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep for up to `seconds`, but wake for a notice; return whether one came."""
        return self._pending.wait(seconds)

    def take_rebalance(self) -> bool:
        """Whether a rebalance was recommended since the last call."""
        if self._rebalance.is_set():
            self._rebalance.clear()
            return True
        return False

    def _receive(self) -> None:
        reader = self._reader
        assert reader is not None
        with reader:
            while numbers := reader.recv(64):
                for number in numbers:
                    if number == signal.SIGUSR2:
                        self.recommend_rebalance()
                    elif number in _CAUSES:
                        self.tell(_CAUSES[number])


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has the signal; Python only needs a handler to be set."""


def _seconds_in(notice_file: Path | None) -> float | None:
    """Seconds until the time in the notice file; None if it has none."""
    if notice_file is None:
        return None
    try:
        record = json.loads(notice_file.read_text())
        when = datetime.fromisoformat(record["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return (when - datetime.now(UTC)).total_seconds()
