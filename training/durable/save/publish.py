"""One save, of tensors or of a folder: its files go to the store, then the head names them.

Nothing exists until the head names it, and nothing is named once its save is cancelled. Imports no
torch.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from training.durable.record.head import CheckpointEntry, Head, Retention
from training.durable.record.lease import Lease, LeaseLostError
from training.durable.record.metrics import Events, Metrics
from training.durable.store.protocol import Store, StoreError
from training.durable.store.transfer import CancelledError, FileEntry, TransferProgress

_log = logging.getLogger(__name__)

# Both must be reached before an attempt gives up: a store may be unavailable for minutes, and a
# full disk fails at once.
_MAX_FAILED_SAVES = 5
_MAX_FAILED_SECONDS = 600.0
_FIRST_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 120.0
# The shortest time between two lines about periodic commits.
_LINE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of one commit on this machine, as measured or as expected."""

    bytes: int
    save_seconds: float  # until the first byte is sent
    upload_seconds: float
    is_measured: bool = True  # an expectation may rest on assumed rates

    @property
    def seconds(self) -> float:
        """Seconds from the boundary to the commit."""
        return self.save_seconds + self.upload_seconds


class FailedSaves:
    """Consecutive saves that failed: when to retry, and when to give up the attempt."""

    def __init__(self) -> None:
        self.count = 0
        self._first_started = 0.0
        self._retry_at = 0.0

    @property
    def seconds_to_retry(self) -> float:
        """Seconds until the next try."""
        return max(0.0, self._retry_at - time.monotonic())

    @property
    def is_retry_due(self) -> bool:
        """Whether a save has failed and its retry need not wait for the interval."""
        return self.count > 0 and not self.seconds_to_retry

    @property
    def is_hopeless(self) -> bool:
        """Whether saves have failed so often, for so long, that more training would be wasted."""
        seconds = time.monotonic() - self._first_started
        return self.count >= _MAX_FAILED_SAVES and seconds >= _MAX_FAILED_SECONDS

    def add(self, started: float) -> None:
        """Count a failed save that started at this time."""
        if not self.count:
            self._first_started = started
        wait = min(_FIRST_RETRY_SECONDS * 2**self.count, _LONGEST_RETRY_SECONDS)
        self.count += 1
        self._retry_at = time.monotonic() + wait

    def clear(self) -> None:
        """Forget the failures: a save was committed."""
        self.count = 0


class Save:
    """One process's part of the state at one moment, and the way of it to the store.

    It runs in the thread of its caller or in one of its own, and is retried only if `failed` counts
    the saves that failed. Of the ranks of a sharded stage, only the first has an entry.
    """

    def __init__(
        self, *, failed: FailedSaves | None = None, over: threading.Event | None = None
    ) -> None:
        self.error: BaseException | None = None
        self.cost: Cost | None = None  # once it is committed
        self.entry: CheckpointEntry | None = None  # of the last try
        self.releases = False  # the lease, in the same write of the head
        self.blocked_seconds = 0.0
        self.began = time.monotonic()
        self.progress = TransferProgress()
        self._failed = failed
        self.earlier: Save | None = None  # published first, unless it is over
        self._lock = threading.Lock()
        self._has_begun = False
        self._is_waiting = False  # for the time to try again
        self._is_publishing = False
        self._hurry = threading.Event()
        self._until = 0.0
        self.over = over or threading.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes that this process sends."""
        raise NotImplementedError

    def entry_after(self, head: Head) -> CheckpointEntry:
        """Return the head's entry for it, without its files."""
        raise NotImplementedError

    def send(self, name: str, tasks: Sequence[Callable[[], None]]) -> tuple[FileEntry, ...] | None:
        """Send what the store lacks, and run the `tasks`; return the files of the entry.

        None if nothing has changed since the last commit.
        """
        raise NotImplementedError

    def facts(self) -> Mapping[str, Any]:
        """Return the facts for the event of its commit, besides step, kind and seconds."""
        raise NotImplementedError

    def publish(self) -> None:
        """Send and commit it; may raise anything."""
        raise NotImplementedError

    def settle(self) -> None:
        """Do what nothing waits for, once it is over and before each retry."""

    def discard(self) -> None:
        """Free what only sending needs, if anything; the save is over."""

    @property
    def is_over(self) -> bool:
        """Whether it was committed, has failed or was cancelled."""
        return self.over.is_set()

    @property
    def is_committed(self) -> bool:
        """Whether the head names the state."""
        return self.is_over and self.error is None

    def seconds_left(self, expected: float) -> float:
        """Remaining seconds at the rate so far; before the first byte, by the expected total."""
        spent, done = time.monotonic() - self.began, self.progress.done_bytes
        if not done:
            return max(0.0, expected - spent)
        return spent * max(0, self.num_bytes - done) / done

    def start(self, *, after: "Save | None" = None) -> None:
        """Run in a daemon thread, so that a hung connection cannot keep the process alive."""
        self.earlier = after
        threading.Thread(target=self.run, name="save", daemon=True).start()

    def run(self) -> None:
        """Publish once those before it are over; an error is kept in `error` for its owner."""
        while (earlier := self.earlier) is not None:
            earlier.wait()
            self.earlier = earlier.earlier
        if self._begin():
            error = self._try()
            while self._is_tried_again(error):
                error = self._try()
            self._end(error)
            self.settle()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait up to `seconds` until it is over; return whether it is."""
        return self.over.wait(seconds)

    def hurry(self, until: float = 0.0) -> None:
        """Retry at once, and then only until that time on the monotonic clock."""
        if not self._hurry.is_set():  # else there is something newer
            self._until = until
            self._hurry.set()

    def give_way(self) -> None:
        """Do not begin or retry: there is something newer."""
        with self._lock:
            if self._is_waiting:
                self.progress.stop.set()
            self._hurry.set()
        if self._begin():
            self._end(CancelledError("it gave way to a newer one"))

    def cancel(self) -> bool:
        """Keep it from being committed; return False if it is too late for that."""
        with self._lock:
            self.progress.stop.set()
            self._hurry.set()
            return not self._is_publishing

    def begin_publishing(self) -> None:
        """From here on it cannot be cancelled; CancelledError if it was."""
        with self._lock:
            if self.progress.stop.is_set():
                raise CancelledError("the save was cancelled")
            self._is_publishing = True

    def _begin(self) -> bool:
        with self._lock:
            has_begun, self._has_begun = self._has_begun, True
        return not has_begun

    def _try(self) -> BaseException | None:
        self._is_publishing = False
        try:
            self.publish()
        except BaseException as error:  # whatever it is, its owner's thread must see it
            return error
        return None

    def _is_tried_again(self, error: BaseException | None) -> bool:
        """Wait until the next try is due; return whether there is one."""
        failed, left = self._failed, self._until - time.monotonic()
        is_last = self._hurry.is_set() and left <= 0
        if failed is None or is_last or not isinstance(error, StoreError):
            return False
        failed.add(self.began)
        self.error = error
        self.settle()
        self.error = None
        _log.warning("[save] not saved: %s; the last commit stays; retrying", error)
        self._is_waiting = True
        if self._hurry.is_set():
            self.progress.stop.wait(min(failed.seconds_to_retry, max(1.0, left / 8)))
        else:
            self._hurry.wait(failed.seconds_to_retry)
        with self._lock:
            self._is_waiting = False
        return True

    def _end(self, error: BaseException | None) -> None:
        if error is None and self._failed is not None:
            self._failed.clear()
        self.error = error
        self.discard()
        self.over.set()


def seconds_until(deadline: float | None) -> float | None:
    """Seconds until a monotonic time, if one is set."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


@dataclass(slots=True)
class CheckpointPublisher:
    """Commits what is saved to the head of a run, and reports it."""

    store: Store
    lease: Lease
    events: Events
    metrics: Metrics
    retention: Retention
    _last_line: float = field(default=-_LINE_SECONDS, init=False)

    def publish(self, save: Save) -> None:
        """Send and commit; may raise StoreError, LeaseLostError and CancelledError."""
        sent_at = time.monotonic()
        save.entry = save.entry_after(self.lease.head)
        name = save.entry.name
        try:
            # The store must have all earlier metrics before the head names a state.
            files = save.send(name, [self.metrics.flush])
            if files is None:
                _log.info("[save] nothing changed since the last commit")
                if save.releases:
                    self.lease.release()
                return
            save.entry = replace(save.entry, files=files)
            save.begin_publishing()
            self.lease.publish(save.entry, retention=self.retention, release=save.releases)
        except (StoreError, LeaseLostError, CancelledError):
            self.lease.abandon(name)
            raise
        save.cost = Cost(
            bytes=save.num_bytes,
            save_seconds=sent_at - save.began,
            upload_seconds=time.monotonic() - sent_at,
        )
        # Here and not in the training thread: it is a request to the store.
        self.events.emit(
            "committed",
            "ok",
            generation=self.lease.head.generation,
            step=save.entry.step,
            kind=save.entry.kind,
            seconds=round(save.cost.seconds, 4),
            **save.facts(),
        )

    def settle(self, save: Save) -> None:
        """After a save, report a refusal, or delete what the retention no longer keeps.

        After a release the successor deletes it, because seconds count then.
        """
        if isinstance(save.error, StoreError):
            entry, message = save.entry, str(save.error)
            assert entry is not None
            self.events.emit(
                "save-failed", "failed", step=entry.step, kind=entry.kind, message=message
            )
        elif save.error is None and not save.releases:
            self.lease.delete_unkept()

    def record(
        self,
        save: Save,
        *,
        step: int | None = None,
        blocked_seconds: float = 0.0,
        slowed_seconds: float = 0.0,
    ) -> None:
        """Record a commit in the metrics and the log."""
        entry, cost = save.entry, save.cost
        assert entry is not None
        assert cost is not None
        self.metrics.write(
            "commit",
            step=entry.step if step is None else step,
            checkpoint_kind=entry.kind,
            seconds=round(cost.seconds, 4),
            blocked_seconds=round(blocked_seconds, 4),
            slowed_seconds=round(slowed_seconds, 4),
            bytes=cost.bytes,
        )
        now = time.monotonic()
        if entry.kind != "periodic" or now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            line = "[checkpoint] step %d, %s: %.1f MB committed in %.2f s"
            _log.info(line, entry.step, entry.kind, cost.bytes / 1e6, cost.seconds)
