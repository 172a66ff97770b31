"""Captures on their way to the store, by one thread in order; one that waits gives way to a newer.

What the store refuses is sent again until something newer was captured.
"""

import logging
import threading
from dataclasses import dataclass, field

from training.record.checkpoint_entry import Kind
from training.record.events import Events
from training.save.capture import Capture
from training.save.listing import SnapshotError
from training.save.publish import Publisher
from training.store.parts import CancelledError
from training.store.protocol import StoreError

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 60.0


@dataclass(kw_only=True, slots=True)
class Parcel:
    """One capture to be committed."""

    capture: Capture
    kind: Kind
    releases: bool = False
    is_tentative: bool = False  # it may hold half of a save
    is_over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Outbox:
    """A thread that publishes; what ends it is in `error`."""

    def __init__(self, publisher: Publisher, events: Events) -> None:
        self.error: BaseException | None = None
        self.refused: StoreError | None = None  # why the last one is not in the store
        self._publisher = publisher
        self._events = events
        self._waiting: Parcel | None = None
        self._current: Parcel | None = None
        self._changed = threading.Condition()
        self._has_started = False
        self._is_ending = False
        self._is_closed = False

    def start(self) -> None:
        """Start the thread, a daemon: a connection that hangs must not keep the process alive.

        No-op if it has started.
        """
        if self._has_started:
            return
        self._has_started = True
        threading.Thread(target=self._run, name="snapshot", daemon=True).start()

    def put(self, parcel: Parcel) -> None:
        """Send this next, instead of one that waits."""
        with self._changed:
            given_up, self._waiting = self._waiting, parcel
            self._changed.notify_all()
        if given_up is not None:
            _end(given_up, SnapshotError("it gave way to a newer one"))

    def drop(self) -> None:
        """Give up the one that waits, if any."""
        with self._changed:
            given_up, self._waiting = self._waiting, None
        if given_up is not None:
            _end(given_up, SnapshotError("it gave way to a newer one"))

    def close(self) -> None:
        """Take no more; what is being sent is not waited for."""
        self.drop()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def raise_error(self) -> None:
        """Raise what has ended the thread."""
        if self.error is not None:
            raise self.error

    def finish(self, seconds: float | None) -> bool:
        """Let what is being sent be tried once more, for up to `seconds`; whether it is over."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            return self._changed.wait_for(self._is_idle, seconds)

    def _is_idle(self) -> bool:
        is_empty = self._waiting is None and self._current is None
        return is_empty or self._is_closed or self.error is not None

    def _run(self) -> None:
        while (parcel := self._take()) is not None:
            error: BaseException | None = None
            try:
                self._send(parcel)
                self.refused = None
            except StoreError as found:
                error = self.refused = found
            except SnapshotError as found:
                error = found
                if not parcel.capture.is_in_place:  # else who captured it tries again
                    _log.warning(f"[snapshot] void: {found}")
            except BaseException as found:  # the thread of the attempt must see it
                error = self.error = found
            _end(parcel, error)
            with self._changed:
                self._current = None
                self._changed.notify_all()
            if self.error is not None:
                return

    def _take(self) -> Parcel | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            self._current, self._waiting = self._waiting, None
            return None if self._is_closed else self._current

    def _send(self, parcel: Parcel) -> None:
        seconds = _RETRY_SECONDS
        while True:
            try:
                self._publisher.publish(
                    parcel.capture,
                    parcel.kind,
                    release=parcel.releases,
                    is_tentative=parcel.is_tentative,
                )
                return
            except CancelledError:
                raise StoreError("there was no time to send it") from None
            except StoreError as error:
                self._events.emit("save-failed", "failed", kind=parcel.kind, message=str(error))
                if self._is_ending or parcel.capture.is_in_place:
                    raise
                _log.warning(f"[snapshot] not saved: {error}; the last one stays; retrying")
            with self._changed:
                self._changed.wait_for(self._must_go_on, seconds)
                if self._waiting is not None or self._is_closed:
                    return
            seconds = min(2 * seconds, _LONGEST_RETRY_SECONDS)

    def _must_go_on(self) -> bool:
        return self._waiting is not None or self._is_closed or self._is_ending


def _end(parcel: Parcel, error: BaseException | None) -> None:
    parcel.capture.discard()
    parcel.error = error
    parcel.is_over.set()
