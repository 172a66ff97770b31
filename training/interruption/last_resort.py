"""Ends the process from a thread of its own when the main thread cannot come to a step boundary.

A long call into C++ (a compilation, a first step, a collective that hangs) lets no Python handler
run; at the last moment of a notice the copy that was staged is committed and the process exits 75,
and at a hang it exits 1, without waiting for that call. Imports no torch.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

from training.errors import EXIT_FAILED, EXIT_INTERRUPTED
from training.interruption.notice import Interruption, Notice
from training.record.lease import Lease, LeaseLostError
from training.store.protocol import StoreError

# How long the main thread may take to see a notice while there is nothing to lose yet.
_GRACE_SECONDS = 5.0
# Kept for the release and the end of the process, beside what the saver keeps for itself.
_RESERVE_SECONDS = 1.0


class StagedCopy(Protocol):
    """What can still be saved without the main thread (the checkpointer, which imports torch)."""

    def must_start_by(self, notice: Notice) -> float:
        """The monotonic time after which `save_staged` would no longer fit the notice."""

    def save_staged(self, notice: Notice) -> bool:
        """Commit the copy that was staged; whether the state is safe."""


class LastResort:
    """Watches one attempt. The first of it and the main thread to end the attempt does so alone."""

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._lock = threading.Lock()
        self._main_ends = threading.Event()
        self._lease: Lease | None = None
        self._staged_copy: StagedCopy | None = None
        self._follows = False
        self._when_failing: Callable[[], None] | None = None
        interruption.when_noticed(self._watch)

    def hold(self, lease: Lease) -> None:
        """From here on there is a lease to release."""
        self._lease = lease

    def save_with(self, staged_copy: StagedCopy) -> None:
        """From here on there may be a state to save."""
        self._staged_copy = staged_copy

    def follow(self) -> None:
        """This rank saves nothing: it only has to be gone in time."""
        self._follows = True

    def lead(self, when_failing: Callable[[], None]) -> None:
        """Other ranks were started; `when_failing` shows where they are."""
        self._when_failing = when_failing

    def stand_down(self) -> None:
        """The main thread ends the attempt itself; does not return if that is too late."""
        with self._lock:
            self._main_ends.set()

    def watch_again(self, notice: Notice) -> None:
        """The main thread has stood it down and trains on: watch it again."""
        with self._lock:
            self._main_ends.clear()
        self._watch(notice)

    def fail(self, why: str) -> None:
        """A hang or a lost rank: show where every thread is, release, exit 1 for a restart.

        Under a notice it is the machine that ends: what is staged is kept, and the exit code is 75.
        """
        with self._lock:
            if self._main_ends.is_set():
                return
            print(f"[failed] {why}; this attempt ends, the last commit stays", file=sys.stderr)
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
            if self._when_failing is not None:
                self._when_failing()
            notice = self._interruption.notice
            if notice is not None:
                self._end(notice)
            self._release_and_exit(EXIT_FAILED)

    def _watch(self, notice: Notice) -> None:
        threading.Thread(target=self._wait, args=(notice,), name="last_resort", daemon=True).start()

    def _wait(self, notice: Notice) -> None:
        # What is staged, and with it the last moment, may still change.
        while (left := self._last_moment(notice) - time.monotonic()) > 0:
            if self._main_ends.wait(min(left, 0.5)):
                return
        with self._lock:
            if self._main_ends.is_set():
                return
            self._end(notice)

    def _last_moment(self, notice: Notice) -> float:
        budget = notice.deadline - notice.received
        if budget <= 0:  # clocks differ, or the notice is old: what is at hand may still be done
            return notice.received + _GRACE_SECONDS
        reserve = min(_RESERVE_SECONDS, 0.05 * budget)
        if self._staged_copy is not None:
            moment = self._staged_copy.must_start_by(notice) - reserve
            return max(moment, notice.received + 0.25 * budget)
        if self._lease is not None or self._follows:
            return notice.deadline - reserve
        return notice.received + min(_GRACE_SECONDS, 0.5 * budget)

    def _end(self, notice: Notice) -> NoReturn:
        what = "no step boundary can be reached" if self._lease else "nothing is held here"
        print(f"[emergency] {what}; ending without the main thread", flush=True)
        if self._staged_copy is not None:
            try:
                self._staged_copy.save_staged(notice)
            except RuntimeError as error:
                print(f"[emergency] the staged copy was not saved: {error}", flush=True)
        self._release_and_exit(EXIT_INTERRUPTED)

    def _release_and_exit(self, code: int) -> NoReturn:
        if self._lease is not None:
            # What could not be released is taken over when it stands still for a TTL.
            with contextlib.suppress(StoreError, LeaseLostError):
                self._lease.release()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
