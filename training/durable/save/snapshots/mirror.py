"""Mirrors a program's checkpoint folder to the run's store as snapshots, unknown to the program.

One thread watches the folder and captures it; others send the captures, one after another. A
waiting capture gives way to a newer one.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from training.durable.attempt.resume_point import Loaded, newest_valid, read_twice
from training.durable.record.head import CheckpointEntry, Head, Kind
from training.durable.record.metrics import Events
from training.durable.save.publish import CheckpointPublisher, seconds_until
from training.durable.save.snapshots.capture import Capture, Moment, capture
from training.durable.save.snapshots.folder_saves import (
    Blobs,
    CommittedSnapshot,
    FolderSave,
    FolderSaves,
)
from training.durable.save.snapshots.listing import (
    ChangedError,
    Listing,
    Root,
    SnapshotError,
    list_folder,
)
from training.durable.save.snapshots.processes import stopped
from training.durable.save.snapshots.quiet import plain
from training.durable.save.snapshots.restore import Filled, fill
from training.durable.save.snapshots.snapshot import FolderManifest, Reason, read_manifest
from training.durable.save.snapshots.watcher import Watcher
from training.durable.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)

_Haste: TypeAlias = Literal["emergency", "rebalance"]

_POLL_SECONDS = 0.1
_LINE_SECONDS = 10.0
# How long a cancelled send may take to end.
_GRACE_SECONDS = 1.0
_NOTHING = FolderManifest(reason="exit", program_says_when=False, files=())


def restore_as(store: Store, name: str, folder: Root) -> None:
    """Fill a folder that is not mirrored from the snapshot of this name; empty it for ""."""
    head = Head.read(store) if name else None
    entry = next((one for one in head.checkpoints if one.name == name), None) if head else None
    if name and entry is None:
        raise StoreError(f"{store.uri} no longer has the snapshot {name}; try again")
    fill(store, read_manifest(store, entry) if entry else _NOTHING, folder)


class Mirror:
    """The snapshots of one folder, by the holder of the run's lease.

    `work` is the mirror's own folder, best on the same file system; where files cannot be cloned,
    it needs room for a copy of what changes between two snapshots.
    """

    def __init__(
        self,
        publisher: CheckpointPublisher,
        *,
        folder: Root,
        work: Path,
        quiet_seconds: float = 10.0,
        note: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.commit_file = work / "commit"
        self._publisher = publisher
        self._folder = folder
        self._work = work
        self._note = note
        self._blobs = Blobs(publisher.store, publisher.lease)
        self._saves = FolderSaves(publisher, folder, self._blobs)
        self._watcher = Watcher(
            folder, self.commit_file, quiet_seconds, self._capture, self._refuse
        )
        self._restored: CheckpointEntry | None = None
        # The file that may be half of a save in what was restored, until it is saved anew: a
        # program may rewrite its settings, or a log, before it reads that.
        self._doubted, self._restored_ns = "", 0
        self._haste: _Haste | None = None
        self._num_captures = 0
        self._program: int | None = None
        self._warned = -_LINE_SECONDS
        self._known_logs = ""  # which files count as logs, as last reported
        self._is_closing = threading.Event()

    @property
    def last(self) -> CommittedSnapshot | None:
        """The last snapshot that this mirror has committed."""
        return self._saves.last

    def checksums(self) -> dict[str, str]:
        """Return the checksum of each file in the newest snapshot, by its path as text."""
        files = {os.fsencode(one.path): one for one in (self._blobs.newest or _NOTHING).files}
        return {
            f"checkpoints/{path.decode(errors='backslashreplace')}": one.content.sha256
            for path, one in files.items()
        }

    def obstacle(self, seconds: float) -> tuple[str, str] | None:
        """Return what has kept the folder from capture for so long, and what will be done."""
        return self._watcher.obstacle(seconds)

    def restore(self) -> tuple[Loaded[Filled] | None, tuple[tuple[str, str], ...]]:
        """Fill the folder from the newest valid snapshot, and return it; None if there is none.

        Also return the newer ones that are not valid, each with the reason.

        Call it before the program starts: anything in the folder must have been left there by the
        run (program/container.py). StoreError if no snapshot can be read but one may be
        intact.
        """
        self._work.mkdir(parents=True, exist_ok=True)
        for left in self._work.glob("staging-*"):
            shutil.rmtree(left, ignore_errors=True)
        self.commit_file.unlink(missing_ok=True)

        def read(store: Store, entry: CheckpointEntry) -> Filled:
            return read_twice(entry, lambda: fill(store, read_manifest(store, entry), self._folder))

        run = self._publisher
        found, passed_over = newest_valid(run.store, run.lease, run.events, read)
        filled = found.content if found else fill(run.store, _NOTHING, self._folder)
        self._blobs.begin_with(filled.manifest, filled.files)
        self._blobs.found_damaged(filled.damaged)
        listing = list_folder(self._folder)
        if found is not None or not listing.is_empty:  # the source has files that are kept
            self._watcher.captured = listing
        if found is not None:
            self._restored = found.entry
            self._watcher.says_when = filled.manifest.program_says_when
            self._watcher.growing.resume(filled.manifest.note)
            self._watcher.rest.earlier_gap = filled.manifest.note.get("gap")
            # One that is not tentative, too: its save may pause for longer than the quiet time. And
            # that of a life that wrote nothing but its settings.
            note, self._restored_ns = filled.manifest.note, listing.began_ns
            known = replace(listing, logs=frozenset(note["logs"])) if "logs" in note else listing
            names = {known.last_saved, note.get("doubted", "")} & listing.files.keys()
            sizes = [(listing.files[name].bytes, name) for name in names]
            self._doubted = max(sizes, default=(0, ""))[1]
            size, reused = filled.manifest.num_bytes / 1e6, filled.reused_bytes / 1e6
            _log.info(
                f"[snapshot] {found.entry.step} restored: {len(filled.manifest.files)} files, "
                f"{size:,.1f} MB, {reused:,.1f} MB of which were on the disk"
            )
            for remark in filled.remarks:
                _log.warning(f"[restore] {remark}")
                run.events.emit("restored-otherwise", message=remark)
        self._blobs.sweep()
        return found, passed_over

    def start(self, program: int | None = None) -> None:
        """Start watching the folder for the program with that process ID, and sending."""
        self._program = program
        self._watcher.start(program)

    def follow(self, program: int) -> None:
        """Go on for a process that the program's first one has left, as if it were the first."""
        self._program = program
        self._watcher.follow(program)

    @contextmanager
    def signalling(self) -> Iterator[None]:
        """Signal the program inside this context: it is stopped to see if it is in a save."""
        with ExitStack() as stack:
            with suppress(SnapshotError):
                stack.enter_context(stopped(self._program))
            with suppress(SnapshotError):
                self._watcher.note_signal()
            yield

    def request(self, haste: _Haste) -> None:
        """Ask for a snapshot at the first quiet second; no-op for a program that says when."""
        self._haste, self._watcher.is_hasty = haste, True

    def check(self) -> None:
        """Raise the error that has ended the mirror, if any."""
        if error := self._watcher.error or self._saves.error:
            raise error

    def end_looks(self) -> None:
        """Look no more, as the program has ended, or is about to be: its end is no change."""
        self._watcher.end_looks()

    def final(
        self, *, exit_code: int, deadline: float | None = None, release: bool = False
    ) -> bool:
        """Commit what the program left when it ended; return whether that is in the store.

        `deadline` is on this process's monotonic clock. `release` also releases the lease, in the
        same write if there is one. StoreError if there was time but the store refused.
        """
        self._is_closing.set()
        self._watcher.stop(seconds_until(deadline))
        self.check()
        moment, why = None, ""
        try:
            moment = self._watcher.last_moment(exit_code, after_notice=self._haste == "emergency")
            self._saves.give_way()  # the last one is newer
        except SnapshotError as error:
            why = str(error)
        is_sent = self._saves.finish(deadline)
        self.check()
        if not is_sent:
            self._saves.cancel()
            _log.warning("[snapshot] there was no time for the last one; the one before it stays")
        elif moment is not None:
            is_sent = self._commit_last(moment, deadline, release)
        elif not self._watcher.is_captured():
            is_sent = False
            _log.warning(f"[snapshot] none at the end: {why}")
        self.check()
        refused = self._saves.refusal
        if deadline is None and refused is not None:
            raise refused
        if release:
            self._publisher.lease.release()
        elif deadline is None:
            self._blobs.sweep()
        return is_sent and refused is None

    def count_failure(self, place: str, silent_end: str = "") -> str:
        """Report a failure of the program that got no further than the snapshot it began with.

        It counts against that snapshot if there is a `place` where it was reading it; if it may
        hold half of a save, so does an end without a word of why. Return what to do in either case,
        or "" if it did get further.
        """
        began_with, run = self._restored, self._publisher
        if began_with is None or (self.last is not None and not self._doubted):
            return ""
        place = place or (silent_end if began_with.is_tentative else "")
        if place:
            # Failures at different places do not add up.
            events = Events.read(run.store, "failed-start")
            is_again = place == next((e["place"] for e in reversed(events) if e.get("place")), "")
            times = began_with.failed_starts * is_again + 1
            run.lease.count_failed_starts(began_with, times)
        run.events.emit("failed-start", snapshot=began_with.name, place=place)
        older = [e.step for e in run.lease.head.checkpoints if e.step < began_with.step]
        back = f"--from-checkpoint {older[-1]}" if older else "--from-scratch"
        stays = "is passed over after two such failures" if place else "stays in use"
        return (
            f"; it began with snapshot {began_with.step} and got no further: if the program or its "
            f"machine is at fault, fix that: the snapshot {stays}; if its files are, go back: "
            f"python -m training reopen {back} --run-uri {run.store.uri}"
        )

    def close(self) -> None:
        """Stop all threads; what is being sent is never committed later."""
        self._is_closing.set()
        self._watcher.stop(0)
        self._saves.cancel()

    def _capture(self, reason: Reason, moment: Moment) -> Listing:
        """Capture the folder; a capture in place is sent before this returns."""
        captured = self._captured_now(reason, moment)
        save = self._prepared(captured, moment)
        if self._haste == "rebalance":
            self._haste, self._watcher.is_hasty = None, False
        self._saves.start(save)
        if captured.is_in_place:
            while not save.wait(_POLL_SECONDS) and not self._is_closing.is_set():
                self.check()
            if isinstance(save.error, SnapshotError):
                raise save.error
            if not save.is_committed:
                raise SnapshotError(f"it was not sent: {save.error or 'the attempt ends'}")
        return captured.listing

    def _captured_now(self, reason: Reason, moment: Moment, *, in_place: bool = False) -> Capture:
        self._num_captures += 1
        gap = self._watcher.rest.usual_gap
        note = {**self._note(), **({} if gap is None else {"gap": round(gap, 3)})}
        with stopped(self._program) if moment.is_standstill else nullcontext():
            captured = capture(
                self._folder,
                self._work / f"staging-{self._num_captures}",
                self._blobs.known,
                reason=reason,
                program_says_when=self._watcher.says_when,
                note=note,
                moment=moment,
                in_place=in_place,
            )
        growing, listing = self._watcher.growing, captured.listing
        if reason == "commit" or self._is_saved_anew(listing):
            self._doubted = ""
        if self._doubted:
            captured = replace(captured, note=(note := {**note, "doubted": self._doubted}))
        growing.captured(listing)
        if not (logs := [path for path in listing.files if listing.is_log(path)]):
            return captured
        is_state = growing.are_state(listing) and not self._watcher.says_when
        how = "as they grow" if is_state else "with other files"
        text = f"treated as logs, and saved {how}: {', '.join(logs)[:1000]}"
        if text != self._known_logs:
            self._known_logs = text
            self._publisher.events.emit("logs", "info", message=text)
        return replace(captured, note={**note, "logs": logs, "longest_ns": growing.longest_ns})

    def _is_saved_anew(self, listing: Listing) -> bool:
        """Whether what was in doubt is gone, or such a file was written since."""
        files, name = listing.files, plain(self._doubted)
        doubted = files.get(self._doubted)
        return doubted is None or any(
            file.mtime_ns > self._restored_ns
            and (plain(path) == name or file.bytes >= doubted.bytes)
            for path, file in files.items()
        )

    def _prepared(self, captured: Capture, moment: Moment) -> FolderSave:
        """Return a save of it; what a tentative one restored stays so until it is rewritten."""
        if self._watcher.was_emptied and (began := self._restored) and self.last is None:
            self._keep(began)
        is_tentative = moment.is_tentative or self._doubted != ""
        kind: Kind = self._haste or "periodic"
        if kind == "emergency":
            self._blobs.stop_copying.set()  # now seconds count
        return FolderSave(self._saves, captured, kind, is_tentative=is_tentative)

    def _keep(self, began: CheckpointEntry) -> None:
        """Keep the snapshot of which the program has emptied its folder: it may begin anew."""
        run = self._publisher
        try:
            kept = run.lease.keep(began)
        except StoreError as error:
            _log.warning(f"[snapshot] {error}; trying again")
            return
        self._watcher.was_emptied = False
        text = (
            f"the program was given snapshot {began.step} and has emptied its folder; snapshot "
            f"{kept} is kept: if the run has started over, "
            f"python -m training reopen --from-checkpoint {kept} --run-uri {run.store.uri} goes "
            "back to it"
        )
        run.events.emit("emptied", "info", message=text, step=began.step)
        _log.warning(f"[snapshot] {text}")

    def _commit_last(self, moment: Moment, deadline: float | None, release: bool) -> bool:
        """Commit the folder as the program left it; try again until the deadline."""
        for pause in self._publisher.store.patience.pauses():
            time.sleep(pause)
            try:
                captured = self._captured_now("exit", moment, in_place=True)
            except ChangedError as error:
                self._warn(f"{error}; trying again")
                continue
            except SnapshotError as error:
                self._refuse(error)
                return False
            save = self._prepared(captured, moment)
            save.releases = release
            self._saves.start(save)
            if not save.wait(seconds_until(deadline)):
                self._saves.cancel()
                save.wait(_GRACE_SECONDS)
            if not isinstance(save.error, ChangedError | StoreError):
                return save.is_committed
        return False

    def _refuse(self, error: SnapshotError) -> None:
        """Report, once in a while, why no snapshot can be taken."""
        if self._warn(str(error)):
            self._publisher.events.emit(
                "save-failed", "failed", kind=self._haste or "periodic", message=str(error)
            )

    def _warn(self, text: str) -> bool:
        now = time.monotonic()
        if now - self._warned < _LINE_SECONDS:
            return False
        self._warned = now
        _log.warning(f"[snapshot] none yet: {text}")
        return True
