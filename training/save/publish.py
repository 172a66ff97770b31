"""One snapshot to the store and into the head, which commits it; one at a time."""

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contract.keys import checkpoint_prefix
from training.record.checkpoint_entry import CheckpointEntry, FileEntry, Kind
from training.record.events import Events
from training.record.lease import Lease
from training.record.metrics import Metrics
from training.record.retention import KEEP_NEWEST, Retention
from training.save.blobs import Blobs
from training.save.capture import Capture
from training.save.known import Known, known_after
from training.save.listing import ChangedError
from training.save.manifest import SNAPSHOT, Snapshot
from training.save.restore import Filled
from training.save.send import Sending, Sent
from training.store.parts import CancelledError, TransferProgress
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)

# What the head calls the one stage of a program.
STAGE = "program"
_LINE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A snapshot that the head names."""

    name: str
    number: int
    seconds: float  # from its capture to the head
    num_files: int
    changed_bytes: int  # of files that had changed
    sent_bytes: int
    written_at: float  # unix seconds: when the program last changed a file of it, logs aside
    note: Mapping[str, Any] = field(default_factory=dict)


class Publisher:
    """Sends captures and has the head name them; `known` is what the store has already."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        root: Path,
        events: Events,
        metrics: Metrics | None = None,
        retention: Retention = KEEP_NEWEST,
    ) -> None:
        self.known = Known()
        self.last: Committed | None = None
        self._store = store
        self._lease = lease
        self._root = root
        self._events = events
        self._metrics = metrics
        self._retention = retention
        self._blobs = Blobs(store, lease)
        self._snapshot: Snapshot | None = None  # the last that was committed or restored
        self._unpublished: tuple[Capture, Sent] | None = None
        self._publishing = threading.Lock()
        self._progress = TransferProgress()
        self._is_cancelled = False

    def sweep(self) -> None:
        """Delete what earlier generations have left and no snapshot of the head needs."""
        self._blobs.sweep()

    def begin_with(self, filled: Filled) -> None:
        """Start from a folder that was restored."""
        self._snapshot = filled.snapshot
        self.known = known_after(filled.snapshot, filled.files)

    def cancel(self) -> None:
        """Keep whatever is not being published from being so."""
        with self._publishing:
            self._is_cancelled = True
            self._progress.stop.set()

    def publish(
        self, capture: Capture, kind: Kind, *, release: bool = False, is_tentative: bool = False
    ) -> None:
        """Send and commit; may raise ChangedError, StoreError, LeaseLostError, CancelledError."""
        began = time.monotonic()
        sent = self._sent(capture)
        if _are_equal(self._snapshot, sent.snapshot):
            _log.info("[snapshot] nothing changed since the last one")
            if release:
                self._lease.release()
        else:
            entry = self._commit(sent.snapshot, kind, release=release, is_tentative=is_tentative)
            self.last = Committed(
                name=entry.name,
                number=entry.step,
                seconds=round(time.monotonic() - began, 4),
                num_files=len(sent.snapshot.files),
                changed_bytes=sent.changed_bytes,
                sent_bytes=sent.sent_bytes,
                written_at=capture.listing.written_ns / 1e9,
                note=sent.snapshot.note,
            )
            self._tell(self.last, kind)
        self._unpublished = None
        self._snapshot = sent.snapshot
        self.known = known_after(sent.snapshot, sent.files)
        if not release:  # else the successor does it: now seconds count
            self._lease.delete_unkept()
            self._blobs.delete_unneeded()

    def _sent(self, capture: Capture) -> Sent:
        """Send it, unless that was done and only the publication failed."""
        if self._unpublished is None or self._unpublished[0] is not capture:
            self._unpublished = None
            self._unpublished = capture, self._send(capture)
        return self._unpublished[1]

    def _send(self, capture: Capture) -> Sent:
        known = self.known.with_earlier(capture.known)
        generation = self._lease.head.generation
        sending = Sending(self._store, capture, known, generation, self._progress)
        try:
            with self._telling_progress():
                sent = sending.run()
            if capture.is_in_place:
                capture.refuse_changed(self._root)
            if sent.snapshot.blobs.keys() - self.known.blobs.keys() - sending.new_blobs.keys():
                # A folder was moved away, left out of the last snapshot, and moved back.
                raise ChangedError("what was left out of it is deleted since its capture")
            return sent
        except BaseException:
            self._blobs.delete_unpublished(sending.new_blobs)
            raise

    def _commit(
        self, snapshot: Snapshot, kind: Kind, *, release: bool, is_tentative: bool
    ) -> CheckpointEntry:
        head = self._lease.head
        number = max((entry.step for entry in head.checkpoints), default=0) + 1
        name = f"{number:08d}-g{head.generation:04d}-{secrets.token_hex(8)}"
        data = snapshot.to_bytes()
        file = FileEntry(name=SNAPSHOT, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        entry = CheckpointEntry(
            name=name,
            step=number,
            stage=STAGE,
            epoch=0,
            kind=kind,
            files=(file,),
            is_tentative=is_tentative,
        )
        self._blobs.add(name, snapshot)
        try:
            self._store.put(checkpoint_prefix(name) + SNAPSHOT, data)
            if self._metrics is not None:
                # Before the head names this state, the store has the metrics of all before it.
                self._metrics.flush()
            with self._publishing:
                if self._is_cancelled:
                    raise CancelledError("the snapshot was cancelled")
                self._lease.publish(entry, retention=self._retention, release=release)
        except (StoreError, CancelledError):
            self._lease.abandon(name)
            raise
        return entry

    def _tell(self, done: Committed, kind: Kind) -> None:
        size = f"{done.sent_bytes / 1e6:.1f} MB sent, {done.changed_bytes / 1e6:.1f} MB changed"
        _log.info(
            f"[snapshot] {done.number}: {done.num_files} files committed in {done.seconds:.2f} s, "
            f"{size}"
        )
        about = asdict(done)
        name, number = about.pop("name"), about.pop("number")
        self._events.emit("committed", "ok", step=number, kind=kind, snapshot=name, **about)
        if self._metrics is not None:
            self._metrics.write(
                "commit",
                step=done.note.get("step", done.number),
                checkpoint_kind=kind,
                seconds=done.seconds,
                blocked_seconds=0.0,
                slowed_seconds=0.0,
                bytes=done.sent_bytes,
            )

    @contextmanager
    def _telling_progress(self) -> Iterator[None]:
        """Log how far it is, every ten seconds."""
        is_over = threading.Event()

        def tell() -> None:
            while not is_over.wait(_LINE_SECONDS):
                done, total = self._progress.done_bytes / 1e6, self._progress.total_bytes / 1e6
                _log.info(f"[snapshot] {done:,.0f} of {total:,.0f} MB sent")

        self._progress.done_bytes = self._progress.total_bytes = 0
        thread = threading.Thread(target=tell, name="snapshot-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _are_equal(one: Snapshot | None, other: Snapshot) -> bool:
    """Whether they hold the same, so that the second need not be published."""
    if one is None or (other.program_says_when and not one.program_says_when):
        return False
    return (one.files, one.links, one.folders) == (other.files, other.links, other.folders)
