"""Everything that may stop an attempt: notices, hangs, lost ranks; and the work that may be long.

A long call into C++ (a compilation, a first step, a collective that hangs) lets no Python handler
run. At the last moment of a notice the staged copy is committed and the process exits with 75, and
after a hang it exits with 1, without waiting for that call. Imports no torch.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, cast

from contract.errors import Exit
from contract.notice import Policy
from training.durable.attempt.notice import ExtraTime, Interruption, Notice
from training.durable.errors import InterruptedRunError
from training.durable.record.head import Head
from training.durable.record.lease import Lease, LeaseLostError, acquire
from training.durable.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)

# systemd's WatchdogSec= is five minutes, so a late ping on a busy machine does no harm.
_PING_SECONDS = 10.0
_END_SECONDS = 600.0
# How long the thread may take to end the process properly, before faulthandler just exits.
_DUMP_SECONDS = 30.0
_STDERR = 2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Watchdog:
    """Watches the main thread: calls `when_hung` after `limit_seconds` without a report; 0: never.

    systemd watches it, by its pings, and so does faulthandler, which ends a process whose watchdog
    can no longer run.
    """

    def __init__(
        self,
        limit_seconds: float,
        when_hung: Callable[[str], None],
        notify_socket: str | None = None,
    ) -> None:
        self._limit_seconds = limit_seconds
        self._when_hung = when_hung
        # Whether silence is legitimate now, because the main thread waits for something outside.
        self.excuse: Callable[[], bool] = lambda: False
        self._notify_socket = notify_socket
        self._last_beat = time.monotonic()
        self._allowed_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start watching and pinging."""
        self._last_beat = time.monotonic()
        if self._limit_seconds or self._notify_socket:
            self._thread.start()

    def close(self) -> None:
        """Stop, because the attempt has ended."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()

    def beat(self) -> None:
        """Report that the main thread makes progress."""
        self._last_beat = time.monotonic()

    @contextlib.contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        """Context of legitimate work that may take `seconds` longer than the limit."""
        before, self._allowed_seconds = self._allowed_seconds, self._allowed_seconds + seconds
        self.beat()
        try:
            yield
        finally:
            self.beat()
            self._allowed_seconds = before

    def _watch(self) -> None:
        interval = min(_PING_SECONDS, self._limit_seconds / 4 or _PING_SECONDS)
        notify(self._notify_socket, "WATCHDOG=1")
        try:
            while not self._stop.wait(interval):
                limit = self._limit_seconds + self._allowed_seconds
                silent = time.monotonic() - self._last_beat
                if self._limit_seconds and silent > limit:
                    if self.excuse():
                        self.beat()  # the main thread gets the limit again from here on
                    else:
                        self._when_hung(f"the trainer made no progress for {silent:.0f} s")
                if self._limit_seconds:
                    later = limit - silent + _DUMP_SECONDS
                    # Not sys.stderr: a notebook's or a test's has no file descriptor.
                    faulthandler.dump_traceback_later(
                        max(later, _DUMP_SECONDS), exit=True, file=_STDERR
                    )
                notify(self._notify_socket, "WATCHDOG=1")
        finally:
            if self._limit_seconds:
                faulthandler.cancel_dump_traceback_later()


def notify(address: str | None, message: str) -> None:
    """Send one message to systemd (sd_notify); no-op where none listens."""
    if address is None:
        return
    # An @ stands for the zero byte of Linux's abstract names.
    target = "\0" + address[1:] if address.startswith("@") else address
    # If a ping is lost, systemd misses it and acts.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.setblocking(False)  # without a reader the watchdog itself must not block
        sender.sendto(message.encode(), target)


class _HeardStore:
    """A store each call of which is reported: one begins when another has ended."""

    def __init__(self, store: Store, beat: Callable[[], None]) -> None:
        self._store, self._beat = store, beat

    def __getattr__(self, name: str) -> Any:
        self._beat()
        return getattr(self._store, name)


Work: TypeAlias = Literal["step", "first step", "compilation", "evaluation", "shard", "model"]

# Assumed until measured in this process. A ResNet-18 took 33 s to compile on 2 cores;
# the end of an evaluation (COCO's matching, pictures) depends on the workload.
_UNMEASURED_SECONDS: dict[Work, float] = {
    "step": 0.0,
    "first step": 10.0,
    "compilation": 120.0,
    "evaluation": 60.0,
    "shard": 60.0,
    "model": 60.0,
}
_SHARE_OF_BUDGET = 0.25
# One slow step is remembered for a few hundred steps, not for the rest of the run.
_FORGETTING = 0.99
# Work that takes a few times longer than ever before is not a hang.
_PATIENCE = 20.0


class _LongWork:
    """Remembers how long each kind of work took, weighted towards the longest time."""

    def __init__(self, budget_seconds: float, watchdog: Watchdog) -> None:
        self._budget_seconds = budget_seconds
        self._watchdog = watchdog
        self._measured: dict[Work, float] = {}

    def expected_seconds(self, work: Work) -> float:
        """Expected duration: measured here, or else assumed."""
        if work in self._measured:
            return self._measured[work]
        if work == "first step":
            return max(_UNMEASURED_SECONDS[work], 10 * self._measured.get("step", 0.0))
        return _UNMEASURED_SECONDS[work]

    def measured_seconds(self, work: Work) -> float | None:
        """Duration as measured here, weighted towards the longest; None if never measured."""
        return self._measured.get(work)

    def is_long(self, work: Work) -> bool:
        """Whether a notice during this work might leave too little time after it."""
        return self.expected_seconds(work) > _SHARE_OF_BUDGET * self._budget_seconds

    @contextlib.contextmanager
    def doing(self, work: Work) -> Iterator[None]:
        """Measure the work, and allow for it in the watchdog."""
        began = time.monotonic()
        with self._watchdog.allowing(_PATIENCE * self.expected_seconds(work)):
            yield
        # First steps and compilations take arbitrarily long: earlier ones predict nothing.
        if work not in ("first step", "compilation"):
            before = _FORGETTING * self._measured.get(work, 0.0)
            self._measured[work] = max(time.monotonic() - began, before)


# How long the main thread may take to see a notice while there is nothing to lose yet.
_GRACE_SECONDS = 5.0


class _StagedCopy(Protocol):
    """The state that can be saved without the main thread (the checkpointer imports torch)."""

    def must_start_by(self, notice: Notice) -> float:
        """The monotonic time after which `save_staged` would no longer fit the notice."""

    def save_staged(self, notice: Notice) -> bool:
        """Commit the staged copy and release; return whether the state is safe."""


class _LastResort:
    """Watches the clock of a notice: the main thread may be in a call that ends too late for it.

    Whichever of it and the main thread ends the attempt first does so alone. Nobody watches it but
    the machine's end, which costs the steps since the last commit.
    """

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._lock = threading.Lock()
        self._main_ends = threading.Event()
        self.lease: Lease | None = None  # released at the end
        self.staged_copy: _StagedCopy | None = None  # saved at the end
        self.follows = False  # this rank saves nothing: it only ends in time
        self.when_failing: Callable[[], None] = lambda: None  # shows where the other ranks are
        interruption.when_noticed(self._watch)

    def stand_down(self) -> None:
        """Leave the end to the main thread; does not return if it is too late for that."""
        with self._lock:
            self._main_ends.set()

    def forget_staged(self) -> None:
        """Keep no copy, as training goes back; does not return if it is being saved."""
        with self._lock:
            self.staged_copy = None

    def watch_again(self, notice: Notice) -> None:
        """Watch the main thread again, which goes on training after a notice."""
        with self._lock:
            self._main_ends.clear()
        self._watch(notice)

    def fail(self, why: str, code: Exit = Exit.FAILED) -> None:
        """End after a hang or a lost rank: print all stacks, release, exit for a restart.

        Under a notice the machine ends anyway: commit the staged copy and exit 75.
        """
        with self._lock:
            if self._main_ends.is_set():
                return
            # Not through logging: the main thread may hang while it holds its lock.
            print(f"[failed] {why}; this attempt ends, the last commit stays", file=sys.stderr)
            sys.stderr.flush()
            faulthandler.dump_traceback(file=_STDERR, all_threads=True)
            self.when_failing()
            notice = self._interruption.notice
            if notice is not None:
                self._end(notice)
            self._release_and_exit(code)

    def end_without(self, why: str, has_ended: threading.Event, code: Exit = Exit.FAILED) -> None:
        """After `fail`, where the main thread ends by itself: exit if that waits for who is gone.

        While the run is not over, rank 0 may still upload its result, for which it needs nobody;
        after that only collective calls are left, which would wait for a day.
        """
        while not has_ended.wait(_END_SECONDS):
            lease = self.lease
            if lease is None or lease.head.state != "running" or lease.lost.is_set():
                print(f"[failed] {why}, and this process's end waited for it", file=sys.stderr)
                os._exit(code)

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
        if (copy := self.staged_copy) is not None:
            reserve = notice.deadline - notice.exit_by
            moment = copy.must_start_by(notice) - reserve
            return max(moment, notice.received + 0.25 * notice.seconds)
        if self.lease is not None or self.follows:
            return notice.exit_by
        return notice.received + min(_GRACE_SECONDS, 0.5 * notice.seconds)

    def _end(self, notice: Notice) -> NoReturn:
        what = "[emergency] no step boundary can be reached; ending without the main thread"
        has_begun = self.lease is not None or self.follows
        print(what if has_begun else "[ok] stopped before the trainer began: nothing to save")
        if self.staged_copy is not None:
            try:
                self.staged_copy.save_staged(notice)
            except RuntimeError as error:
                print(f"[emergency] the staged copy was not saved: {error}", flush=True)
        self._release_and_exit(Exit.INTERRUPTED)

    def _release_and_exit(self, code: int) -> NoReturn:
        if self.lease is not None:
            # A lease that could not be released is taken over after a TTL without a heartbeat.
            with contextlib.suppress(StoreError, LeaseLostError):
                self.lease.release()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Supervisor:
    """Holds the guards of one attempt, from before the first slow import to the process's end.

    It watches nothing by itself: the watchdog watches for silence, the last resort the time of a
    notice, and systemd the process, which it starts again.
    """

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
        self.last_resort = _LastResort(self.interruption)
        self.watchdog = Watchdog(watchdog_seconds, self.last_resort.fail, notify_socket)
        self.long_work = _LongWork(budget_seconds, self.watchdog)

    def begin(self) -> None:
        """Listen and watch; until then a signal without a handler ends the process."""
        self.interruption.listen()
        self.watchdog.start()

    def hearing(self, store: Store) -> Store:
        """Return the store for what is read at length: each part that arrives is a report."""
        return cast(Store, _HeardStore(store, self.watchdog.beat))

    def take_lease(
        self, store: Store, run_id: str, writer: str, ttl_seconds: float
    ) -> Lease | Head:
        """Take over the run and hold it, after any holder; return its head if it has ended."""

        def waiting(holder: str) -> None:
            line = "[lease] held by %s; taking over if it shows no heartbeat for %g s"
            _log.info(line, holder, ttl_seconds)

        def wait(seconds: float) -> bool:
            self.watchdog.beat()
            return self.interruption.wait(seconds)

        lease = acquire(store, run_id, writer, ttl_seconds, wait, waiting)
        if isinstance(lease, Lease):
            self.last_resort.lease = lease
            self.extra_time.held = store, lease
        return lease

    def wait_for_others(self) -> None:
        """Call often while other hosts are waited for; InterruptedRunError ends the wait."""
        self.watchdog.beat()
        if (notice := self.interruption.notice) is not None:
            self.last_resort.stand_down()
            raise InterruptedRunError(notice.cause)

    def follow(self) -> None:
        """In a rank above 0, which holds no lease, only end in time."""
        self.last_resort.follows = self.extra_time.follows = True
        # Rank 0 may work alone for a long time, and its watchdog covers all ranks.
        self.watchdog.close()

    @staticmethod
    def end_with_rank_0() -> None:
        """In a rank started by rank 0, exit when rank 0 does, even during a call that hangs.

        A process that is stopped, or hangs with the interpreter's lock, runs no thread to see the
        pipe close; Linux kills it when the thread that started it, rank 0's main one, has ended.
        """
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        def wait() -> None:
            # Not sys.stdin.buffer: a thread that reads from it holds its lock, and Python aborts
            # if it cannot take that lock to close the stream at exit.
            while os.read(sys.stdin.fileno(), 1):
                pass
            os._exit(1)  # nothing reads this exit code

        threading.Thread(target=wait, name="rank-0", daemon=True).start()

    def close(self) -> None:
        """Stop supervising: the process ends by itself."""
        self.extra_time.close()
        self.last_resort.stand_down()
        self.watchdog.close()
        self.interruption.close()
