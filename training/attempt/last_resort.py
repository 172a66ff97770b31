"""Ends the process from its own thread when the main thread cannot reach a step boundary.

A long call into C++ (a compilation, a first step, a collective that hangs) lets no Python handler
run; at the last moment of a notice the staged copy is committed and the process exits 75, and at a
hang it exits 1, without waiting for that call. Imports no torch.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

from training.attempt.notice import Interruption, Notice
from training.attempt.watchdog import STDERR
from training.errors import EXIT_FAILED, EXIT_INTERRUPTED
from training.record.lease import Lease, LeaseLostError
from training.store.protocol import StoreError

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
