"""Everything that may stop an attempt: notices, hangs, lost ranks. Imports no torch.

A long call into C++ (a compilation, a first step, a collective that hangs) lets no Python handler
run; at the last moment of a notice the staged copy is committed and the process exits 75, and at a
hang it exits 1, without waiting for that call.
"""

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from contract.notice import Policy
from training.attempt.extra_time import ExtraTime
from training.attempt.long_work import LongWork
from training.attempt.notice import Interruption, Notice
from training.attempt.watchdog import STDERR, Watchdog
from training.errors import EXIT_FAILED, EXIT_INTERRUPTED
from training.record.head import Head
from training.record.lease import Lease, LeaseLostError, acquire
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)

# How long the main thread may take to see a notice while there is nothing to lose yet.
_GRACE_SECONDS = 5.0


class _StagedCopy(Protocol):
    """What can still be saved without the main thread (the checkpointer, which imports torch)."""

    def must_start_by(self, notice: Notice) -> float:
        """The monotonic time after which `save_staged` would no longer fit the notice."""

    def save_staged(self, notice: Notice) -> bool:
        """Commit the staged copy and release; return whether the state is safe."""


class LastResort:
    """Watches one attempt. The first of it and the main thread to end the attempt does so alone."""

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._lock = threading.Lock()
        self._main_ends = threading.Event()
        self._lease: Lease | None = None
        self._staged_copy: _StagedCopy | None = None
        self._follows = False
        self._when_failing: Callable[[], None] | None = None
        interruption.when_noticed(self._watch)

    def hold(self, lease: Lease) -> None:
        """Release this lease at the end, from here on."""
        self._lease = lease

    def save_with(self, staged_copy: _StagedCopy | None) -> None:
        """Save this staged copy at the end, from here on; None: there is none any more."""
        self._staged_copy = staged_copy

    def follow(self) -> None:
        """Only end in time: this rank saves nothing."""
        self._follows = True

    def lead(self, when_failing: Callable[[], None]) -> None:
        """Call `when_failing` on a failure: it shows where the other ranks are."""
        self._when_failing = when_failing

    def stand_down(self) -> None:
        """Leave the end to the main thread; does not return if it is too late for that."""
        with self._lock:
            self._main_ends.set()

    def watch_again(self, notice: Notice) -> None:
        """Watch the main thread again, which trains on after a notice."""
        with self._lock:
            self._main_ends.clear()
        self._watch(notice)

    def fail(self, why: str) -> None:
        """End after a hang or a lost rank: print all stacks, release, exit 1 for a restart.

        Under a notice the machine ends anyway: commit the staged copy and exit 75.
        """
        with self._lock:
            if self._main_ends.is_set():
                return
            # Not through logging: the main thread may hang with its lock.
            print(f"[failed] {why}; this attempt ends, the last commit stays", file=sys.stderr)
            sys.stderr.flush()
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
            if self._when_failing is not None:
                self._when_failing()
            notice = self._interruption.notice
            if notice is not None:
                self._end(notice)
            self._release_and_exit(EXIT_FAILED)

    def _watch(self, notice: Notice) -> None:
        threading.Thread(target=self._wait, args=(notice,), name="last_resort", daemon=True).start()

    def _wait(self, notice: Notice) -> None:
        # The staged copy, and with it the last moment, may still change.
        while (left := self._last_moment(notice) - time.monotonic()) > 0:
            if self._main_ends.wait(min(left, 0.5)):
                return
        with self._lock:
            if self._main_ends.is_set():
                return
            self._end(notice)

    def _last_moment(self, notice: Notice) -> float:
        if self._staged_copy is not None:
            reserve = notice.deadline - notice.exit_by
            moment = self._staged_copy.must_start_by(notice) - reserve
            return max(moment, notice.received + 0.25 * notice.seconds)
        if self._lease is not None or self._follows:
            return notice.exit_by
        return notice.received + min(_GRACE_SECONDS, 0.5 * notice.seconds)

    def _end(self, notice: Notice) -> NoReturn:
        what = "[emergency] no step boundary can be reached; ending without the main thread"
        has_begun = self._lease is not None or self._follows
        print(what if has_begun else "[ok] stopped before the trainer began: nothing to save")
        if self._staged_copy is not None:
            try:
                self._staged_copy.save_staged(notice)
            except RuntimeError as error:
                print(f"[emergency] the staged copy was not saved: {error}", flush=True)
        self._release_and_exit(EXIT_INTERRUPTED)

    def _release_and_exit(self, code: int) -> NoReturn:
        if self._lease is not None:
            # A lease that could not be released is taken over after a TTL without a heartbeat.
            with contextlib.suppress(StoreError, LeaseLostError):
                self._lease.release()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Supervisor:
    """Supervises one attempt, from before the first slow import to the end of the process."""

    def __init__(
        self,
        *,
        budget_seconds: float,
        notice_file: Path | None = None,
        notice_policy: Policy = "train-on",
        watchdog_seconds: float = 0.0,
        notify_socket: str | None = None,
    ) -> None:
        self.began = time.monotonic()
        self.interruption = Interruption(budget_seconds=budget_seconds, notice_file=notice_file)
        self.extra_time = ExtraTime(self.interruption, notice_policy)
        self.last_resort = LastResort(self.interruption)
        self.watchdog = Watchdog(watchdog_seconds, self.last_resort.fail, notify_socket)
        self.long_work = LongWork(budget_seconds, self.watchdog)

    def begin(self) -> None:
        """Listen and watch; until then a signal without a handler ends the process."""
        self.interruption.listen()
        self.watchdog.start()

    def take_lease(
        self, store: Store, run_id: str, writer: str, ttl_seconds: float
    ) -> Lease | Head:
        """Take over the run and hold it, waiting for its holder; its head if it has ended."""

        def waiting(holder: str) -> None:
            line = "[lease] held by %s; taking over if it shows no heartbeat for %g s"
            _log.info(line, holder, ttl_seconds)

        def wait(seconds: float) -> bool:
            self.watchdog.beat()
            return self.interruption.wait(seconds)

        lease = acquire(store, run_id, writer, ttl_seconds, wait, waiting)
        if isinstance(lease, Lease):
            self.last_resort.hold(lease)
            self.extra_time.hold(store, lease)
        return lease

    def follow(self) -> None:
        """In a rank above 0, which holds no lease: only end in time."""
        self.last_resort.follow()
        self.extra_time.follow()
        # Rank 0 may be at work on its own for long, and its watchdog is for all.
        self.watchdog.close()

    def close(self) -> None:
        """Stop supervising: the process ends by itself."""
        self.extra_time.close()
        self.last_resort.stand_down()
        self.watchdog.close()
        self.interruption.close()
