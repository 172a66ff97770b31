"""The saves of one folder, in order: one that waits gives way to a newer one."""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.record.checkpoint_entry import Kind
from training.record.events import Events
from training.record.lease import Lease
from training.record.metrics import Metrics
from training.record.retention import KEEP_NEWEST, Retention
from training.save.blobs import Blobs
from training.save.capture import Capture
from training.save.folder import FolderSource
from training.save.listing import SnapshotError
from training.save.publish import CheckpointPublisher, FailedSaves, Save
from training.store.parts import CancelledError
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedSnapshot:
    """A snapshot that the head names."""

    number: int
    seconds: float  # from its capture to the head
    written_at: float  # unix seconds: when the program last changed a file of it, logs aside
    num_files: int
    changed_bytes: int  # of files that had changed
    sent_bytes: int


class FolderSaves:
    """Has the head name one capture after the other; `blobs` know what the store has already."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        root: Path,
        *,
        events: Events,
        metrics: Metrics | None = None,
        retention: Retention = KEEP_NEWEST,
    ) -> None:
        self.blobs = Blobs(store, lease)
        self.last: CommittedSnapshot | None = None
        self.error: BaseException | None = None  # what has ended the saves
        self._store = store
        self._root = root
        self._publisher = CheckpointPublisher(
            store, lease, events=events, metrics=metrics, retention=retention
        )
        self._failed = FailedSaves()
        self._newest: Save[FolderSource] | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False

    @property
    def refusal(self) -> StoreError | None:
        """Why the newest is not in the store."""
        error = self._newest.error if self._newest is not None else None
        return error if isinstance(error, StoreError) else None

    def prepare(
        self, captured: Capture, kind: Kind, *, is_tentative: bool = False
    ) -> Save[FolderSource]:
        """A save of what was captured."""
        source = FolderSource(
            self._store,
            self.blobs,
            captured,
            self._root,
            kind,
            is_tentative=is_tentative,
        )
        # What is sent from where it lies is not tried again: the program waits for it.
        failed = None if captured.is_in_place else self._failed
        return Save(source, self._publish, self._publisher.settle, failed=failed)

    def start(self, save: Save[FolderSource]) -> None:
        """Send this next, instead of one that waits."""
        with self._lock:
            before, self._newest = self._newest, save
            if self._is_cancelled:
                save.cancel()
            save.start(after=before)
        if before is not None:
            before.give_way()

    def give_way(self) -> None:
        """Do not begin the newest, if it waits."""
        if self._newest is not None:
            self._newest.give_way()

    def _unfinished(self) -> Iterator[Save[FolderSource]]:
        """The saves that may not be over yet, the newest first."""
        with self._lock:
            save = self._newest
        while save is not None:
            yield save
            save = save.earlier

    def finish(self, deadline: float | None) -> bool:
        """Let what is being sent be tried once more, until the deadline; whether it is over."""
        for save in self._unfinished():
            save.hurry()
            if not save.wait(seconds_until(deadline)):
                return False
        return True

    def cancel(self) -> None:
        """Keep whatever is not being published from being so, now and later."""
        with self._lock:
            self._is_cancelled = True
        for save in self._unfinished():
            if not save.cancel():
                save.wait()  # the head is being written, which is bounded

    def _publish(self, save: Save[FolderSource]) -> None:
        """Publish, and know from then on what the store has."""
        if self.error is not None:
            raise self.error
        save.began = time.monotonic()
        try:
            self._publisher.publish(save)
            self._know(save)
        except SnapshotError as error:
            if not save.source.capture.is_in_place:  # else who captured it tries again
                _log.warning(f"[snapshot] void: {error}")
            raise
        except (StoreError, CancelledError):
            raise
        except BaseException as error:  # the attempt's thread must see it
            self.error = error
            raise

    def _know(self, save: Save[FolderSource]) -> None:
        sent, entry = save.source.sent, save.entry
        assert sent is not None
        assert entry is not None
        self.blobs.begin_with(sent.manifest, sent.files)
        if save.cost is not None:  # else nothing had changed
            self.last = CommittedSnapshot(
                number=entry.step,
                seconds=save.cost.seconds,
                written_at=save.source.capture.listing.written_ns / 1e9,
                num_files=len(sent.manifest.files),
                changed_bytes=sent.changed_bytes,
                sent_bytes=sent.sent_bytes,
            )
            self._publisher.tell(save, step=sent.manifest.note.get("step"))
        if not save.releases:  # else the successor does it: now seconds count
            self.blobs.delete_unneeded()


def seconds_until(deadline: float | None) -> float | None:
    """Seconds until a monotonic time; None if there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
