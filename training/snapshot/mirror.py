"""Mirrors a program's checkpoint folder to the run's store as snapshots; the program knows nothing.

One thread watches the folder and captures it, another sends what was captured, oldest first: a
capture that waits gives way to a newer one.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from training.errors import UserError
from training.record.checkpoint_entry import CheckpointEntry, Kind
from training.record.events import Events
from training.record.lease import Lease
from training.record.metrics import Metrics
from training.record.newest_valid import newest_valid, read_twice
from training.record.retention import KEEP_NEWEST, Retention
from training.snapshot.capture import Capture, capture
from training.snapshot.listing import ChangedError, Listing, SnapshotError, leaves, list_folder
from training.snapshot.manifest import Reason, Snapshot
from training.snapshot.moments import QuietTime
from training.snapshot.outbox import Outbox, Parcel
from training.snapshot.publish import Committed, Publisher
from training.snapshot.restore import Filled, fill, read_snapshot
from training.store.protocol import Store, StoreError
from training.store.unfinished import write_whole

_log = logging.getLogger(__name__)

Haste: TypeAlias = Literal["emergency", "rebalance"]

# How often the commit file is looked for: a program may wait for it.
_POLL_SECONDS = 0.025
# Looking at a big folder takes at most this share of one core.
_LOOKING_SHARE = 0.02
# After a notice: the program may be gone before the usual quiet time is over.
_HASTY_SECONDS = 1.0
_LINE_SECONDS = 10.0
_FINAL_ATTEMPTS = 4
# What a send that is cancelled gets to say so.
_GRACE_SECONDS = 1.0
_NOTHING = Snapshot(reason="exit", program_says_when=False, files=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The snapshot that the folder now holds."""

    entry: CheckpointEntry
    num_files: int
    bytes: int
    reused_bytes: int  # of them, those that were on the disk already
    passed_over: tuple[tuple[str, str], ...]  # newer snapshots that do not hold, and why
    note: Mapping[str, Any] = field(default_factory=dict)


class Mirror:
    """The snapshots of one folder, by the holder of the run's lease.

    `work` is a folder of the mirror's own, best on the same file system; it needs room for a copy
    of what changes between two snapshots where files cannot be cloned.
    """

    def __init__(
        self,
        *,
        store: Store,
        lease: Lease,
        folder: Path,
        work: Path,
        events: Events,
        metrics: Metrics | None = None,
        retention: Retention = KEEP_NEWEST,
        quiet_seconds: float = 10.0,
        note: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.commit_file = work / "commit"
        self._store = store
        self._lease = lease
        self._folder = folder
        self._work = work
        self._events = events
        self._quiet_seconds = quiet_seconds
        self._note = note
        self._publisher = Publisher(
            store, lease, folder, events=events, metrics=metrics, retention=retention
        )
        self._outbox = Outbox(self._publisher, events)
        self._says_when = False
        self._haste: Haste | None = None
        self._quiet = QuietTime()
        self._captured: Listing | None = None
        self._num_captures = 0
        self._told: set[str] = set()
        self._line = -_LINE_SECONDS
        self._stop = threading.Event()
        self._watching: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def last(self) -> Committed | None:
        """The last snapshot that this mirror has committed."""
        return self._publisher.last

    def restore(self) -> Restored | None:
        """Fill the folder from the newest snapshot that holds; None if there is none.

        Call it before the program starts. UserError if the folder has files that no attempt of a
        run has left there, StoreError if no snapshot can be read and one of them may be whole.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign()
        for left in self._work.glob("staging-*"):
            shutil.rmtree(left, ignore_errors=True)
        self.commit_file.unlink(missing_ok=True)

        def read(store: Store, entry: CheckpointEntry) -> Filled:
            return read_twice(entry, lambda: fill(store, read_snapshot(store, entry), self._folder))

        found, passed_over = newest_valid(self._store, self._lease.head.checkpoints, read)
        for name, why in passed_over:
            _log.warning(f"[snapshot] {name} is passed over: {why}")
        if found is None:
            fill(self._store, _NOTHING, self._folder)
            self._publisher.sweep()
            return None
        filled = found.snapshot
        self._says_when = filled.snapshot.program_says_when
        self._publisher.begin_with(filled)
        self._publisher.sweep()
        restored = Restored(
            entry=found.entry,
            num_files=len(filled.snapshot.files),
            bytes=filled.snapshot.num_bytes,
            reused_bytes=filled.reused_bytes,
            passed_over=passed_over,
            note=filled.snapshot.note,
        )
        self._tell_restored(restored)
        return restored

    def start(self) -> None:
        """Watch the folder from now on, and send."""
        self._outbox.start()
        self._watching = threading.Thread(target=self._watch, name="mirror", daemon=True)
        self._watching.start()

    def request(self, haste: Haste) -> None:
        """Ask for a snapshot at the first quiet second; no-op for a program that says when."""
        self._haste = haste

    def check(self) -> None:
        """Raise what has ended the mirror."""
        if error := self._error or self._outbox.error:
            raise error

    def final(
        self, *, exit_code: int, deadline: float | None = None, release: bool = False
    ) -> bool:
        """Commit what the program left when it ended; return whether that is in the store.

        `deadline` is on this process's monotonic clock. With `release` the lease goes too, in the
        same write where there is one. StoreError if there was time, and the store refused.
        """
        self._stop_watching(deadline)
        self.check()
        why = self._why_not(exit_code)
        if why is None:
            self._outbox.drop()
        else:
            _log.warning(f"[snapshot] none at the end: {why}")
        if not self._outbox.wait(_left(deadline)):
            self._publisher.cancel()
            why = "there was no time to send it"
        is_safe = why is None and self._commit_last(exit_code, deadline, release)
        if release and not self._lease.lost.is_set():
            self._lease.release()
        elif deadline is None:
            self._publisher.sweep()
        self.check()
        return is_safe

    def close(self) -> None:
        """Stop both threads; what is being sent is never committed later."""
        self._stop.set()
        self._publisher.cancel()
        self._outbox.close()

    def _watch(self) -> None:
        next_look = 0.0
        try:
            while not self._stop.wait(_POLL_SECONDS):
                if self.commit_file.exists():
                    self._commit_asked()
                elif time.monotonic() >= next_look and self._may_choose:
                    next_look = self._look()
        except BaseException as error:  # the attempt's thread must see it
            self._error = error

    @property
    def _may_choose(self) -> bool:
        """Whether the mirror chooses the moment."""
        return self._quiet_seconds > 0 and not self._says_when

    def _commit_asked(self) -> None:
        """Capture what the program asked for, and remove the file it waits for."""
        self._says_when = True
        try:
            asked = self.commit_file.stat()
            self._capture("commit")
        except ChangedError as error:
            self._say(f"the program asked for a snapshot, but {error}; trying again")
            return
        except FileNotFoundError:
            return
        except SnapshotError as error:
            self._refuse(error)
        # Touched once more while it was captured: that asks for another one.
        if _same(asked, self.commit_file):
            self.commit_file.unlink(missing_ok=True)

    def _look(self) -> float:
        """Capture the folder if it has been quiet; return when to look again."""
        began = time.monotonic()
        wanted = min(self._quiet_seconds, _HASTY_SECONDS) if self._haste else self._quiet_seconds
        try:
            listing = list_folder(self._folder)
            quiet = self._quiet.look(listing)
            self._tell_odd(listing)
            is_new = self._captured is None or self._captured.difference(listing) is not None
            if is_new and quiet >= wanted and not listing.is_empty and self._quiet.is_closed():
                self._capture("notice" if self._haste else "quiet")
                if self._haste == "rebalance":
                    self._haste = None
        except ChangedError:
            pass  # not quiet after all
        except SnapshotError as error:
            self._refuse(error)
        looked = time.monotonic() - began
        return time.monotonic() + max(min(wanted / 5, 1.0), looked / _LOOKING_SHARE)

    def _capture(self, reason: Reason) -> None:
        """Capture the folder; sent from where it lies, it is sent before this returns."""
        captured = self._captured_now(reason)
        parcel = Parcel(capture=captured, kind=self._kind)
        is_in_place = captured.is_in_place
        self._outbox.put(parcel)
        if not is_in_place:
            self._captured = captured.listing
            return
        while not parcel.is_over.wait(0.1) and not self._stop.is_set():
            self._outbox.raise_error()
        if isinstance(parcel.error, ChangedError):
            raise parcel.error
        if parcel.error is None:
            self._captured = captured.listing

    def _captured_now(self, reason: Reason, *, in_place: bool = False) -> Capture:
        self._num_captures += 1
        return capture(
            self._folder,
            self._work / f"staging-{self._num_captures}",
            self._publisher.known,
            reason=reason,
            program_says_when=self._says_when,
            note=self._note(),
            in_place=in_place,
        )

    @property
    def _kind(self) -> Kind:
        return self._haste or "periodic"

    def _stop_watching(self, deadline: float | None) -> None:
        self._stop.set()
        if self._watching is not None:
            self._watching.join(_left(deadline))

    def _why_not(self, exit_code: int) -> str | None:
        """Why what is in the folder now must not be committed; None if it may."""
        if self._says_when and exit_code != 0:
            asked = exit_code > 0 and self.commit_file.exists()
            return None if asked else "what came after the program's last commit does not count"
        if exit_code >= 0:
            return None
        try:
            quiet = self._quiet.look(list_folder(self._folder))
        except SnapshotError as error:
            return str(error)
        if self._quiet.held_open:
            return f"{self._quiet.held_open!r} was open for writing when the program was killed"
        if quiet < self._quiet_seconds:
            return f"the folder changed {quiet:.1f} s before the program was killed"
        return None

    def _commit_last(self, exit_code: int, deadline: float | None, release: bool) -> bool:
        """Commit the folder as the program left it."""
        for _ in range(_FINAL_ATTEMPTS):
            try:
                captured = self._captured_now("exit", in_place=True)
            except ChangedError as error:
                self._say(f"{error}; trying again")
                continue
            except SnapshotError as error:
                self._refuse(error)
                return False
            parcel = Parcel(capture=captured, kind=self._kind, is_last=True, releases=release)
            self._outbox.put(parcel)
            if not parcel.is_over.wait(_left(deadline)):
                self._publisher.cancel()
                parcel.is_over.wait(_GRACE_SECONDS)
            self.check()
            if parcel.error is None and parcel.is_over.is_set():
                return True
            if isinstance(parcel.error, StoreError) and deadline is None:
                raise parcel.error
            if not isinstance(parcel.error, ChangedError):
                return False
        return False

    def _refuse_foreign(self) -> None:
        """Refuse to empty a folder that somebody else has filled."""
        mark = self._work / "folder.json"
        if not mark.exists():
            listing = list_folder(self._folder)
            if not listing.is_empty:
                raise UserError(
                    f"{self._folder} holds {len(listing.files)} files that no attempt of a run has "
                    "left there; move them away, or give another folder"
                )
        self._work.mkdir(parents=True, exist_ok=True)
        write_whole(mark, json.dumps({"run": self._store.uri}).encode())

    def _refuse(self, error: SnapshotError) -> None:
        """Say, once in a while, why no snapshot can be taken."""
        if self._say(str(error)):
            self._events.emit("save-failed", "failed", kind=self._kind, message=str(error))

    def _say(self, text: str) -> bool:
        now = time.monotonic()
        if now - self._line < _LINE_SECONDS:
            return False
        self._line = now
        _log.warning(f"[snapshot] none yet: {text}")
        return True

    def _tell_odd(self, listing: Listing) -> None:
        """Say once what is not saved."""
        for path, kind in listing.skipped.items():
            self._tell_once(path, f"{path!r} is {kind} and is not saved")
        for path, target in listing.links.items():
            if leaves(self._folder, path, target):
                self._tell_once(
                    path,
                    f"{path!r} points out of the folder, to {target!r}: the link is saved, "
                    "what it points to is not",
                )

    def _tell_once(self, path: str, text: str) -> None:
        if path not in self._told:
            self._told.add(path)
            _log.warning(f"[snapshot] {text}")

    def _tell_restored(self, restored: Restored) -> None:
        size, reused = restored.bytes / 1e6, restored.reused_bytes / 1e6
        _log.info(
            f"[snapshot] {restored.entry.step} restored: {restored.num_files} files, "
            f"{size:,.1f} MB, {reused:,.1f} MB of them were on the disk"
        )


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _same(before: os.stat_result, path: Path) -> bool:
    """Whether nobody has touched the file since."""
    with suppress(FileNotFoundError):
        now = path.stat()
        return (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    return False
