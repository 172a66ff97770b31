"""Saves of a folder: send what the store lacks, large files in parts, small ones packed.

A request takes 20 to 100 ms and costs the same however small its object is: 10,000 small files in
packs take some dozen requests (docs/checkpoints.md has the figures). Memory: one pack or part per
thread. Blobs that a snapshot of the head needs are kept, and the others deleted; those that all
snapshots need are stored twice, or one damaged blob would damage them all.

Why no writer deletes what another needs, however late it wakes:
1. A blob's name is never used twice, so a late deletion hits only the blob it was meant for.
2. A writer deletes a blob only after it has itself written a head whose snapshots do not need it,
   and never uses the blob again.
3. A successor uses only blobs of snapshots that the head named when it took over. That head is the
   one of 2, or a later one by the same writer, whose snapshots do not use the blob either.
4. A take-over sweeps only blobs of earlier generations, whose writers the store now refuses.
   What such a writer still sends is swept by the next take-over, or at the end of the run.
"""

import hashlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from contract.keys import BLOBS, blob_key, blob_of, checkpoint_prefix, generation_in, second_key
from training.durable.attempt.resume_point import DamagedCheckpointError, read_twice
from training.durable.record.head import CheckpointEntry, Head, Kind, checkpoint_name
from training.durable.record.lease import Lease
from training.durable.save.publish import CheckpointPublisher, FailedSaves, Save, seconds_until
from training.durable.save.snapshots.capture import Capture, CapturedFile, Known, Pack, packed
from training.durable.save.snapshots.listing import (
    ChangedError,
    FileState,
    Root,
    SnapshotError,
    places_of,
)
from training.durable.save.snapshots.snapshot import (
    SMALL_BYTES,
    SNAPSHOT,
    Content,
    FolderManifest,
    Reason,
    SavedFile,
    SavedFolder,
    SavedLink,
    read_manifest,
)
from training.durable.store.protocol import Store, StoreError
from training.durable.store.transfer import (
    CancelledError,
    Contents,
    FileEntry,
    Spare,
    TransferProgress,
    put_text,
    run_all,
    send,
)

_log = logging.getLogger(__name__)

# The head's name for the one stage of a program.
_STAGE = "program"
_LINE_SECONDS = 10.0
# More threads bring little, and each holds a part.
_MAX_THREADS = 8


class Blobs:
    """The blobs of a run, as the holder of its lease sees them; used by one thread at a time.

    Only `copy_shared` runs concurrently with the other methods.
    """

    def __init__(self, store: Store, lease: Lease) -> None:
        self.known = Known()  # what the next snapshot need not send
        self.newest: FolderManifest | None = None  # the last one committed or restored
        self.stop_copying = threading.Event()
        self._copying = threading.Lock()
        self._copied: set[str] = set()
        self._damaged: set[str] = set()  # the next snapshot sends their contents again
        self._store = store
        self._lease = lease
        self._manifests: dict[str, FolderManifest] = {}  # by name: all that the head may name
        self._there: set[str] = set()  # blobs that may exist

    def begin_with(self, manifest: FolderManifest, files: Mapping[FileState, Content]) -> None:
        """Start from a folder that equals this snapshot, which was committed or restored."""
        self.newest, self.known = manifest, Known.after(manifest, files).without(self._damaged)

    def found_damaged(self, blobs: Iterable[str]) -> None:
        """Stop using them: the folder has their contents, which the next snapshot sends again."""
        self._damaged |= set(blobs)
        self.known = self.known.without(self._damaged)

    def add(self, name: str, manifest: FolderManifest) -> None:
        """Add a snapshot before trying to publish it: that may succeed without an answer."""
        self._manifests[name] = manifest
        self._there |= manifest.blobs.keys()

    def sweep(self) -> None:
        """Delete the blobs of earlier generations that no snapshot of the head needs."""
        generation = self._lease.head.generation
        try:
            self._read_unknown()
            keys = self._store.sizes(BLOBS)
        except StoreError as error:
            _log.warning(f"[sweep] {error}; the next take-over sweeps")
            return
        names = {name for name in map(blob_of, keys) if name}
        self._copied |= {name for name in names if second_key(name) in keys}
        self._there |= {name for name in names if generation_in(name) < generation}
        self.delete_unneeded()

    def delete_unneeded(self) -> None:
        """Delete the blobs that no snapshot of the head needs; nothing waits for it.

        One that cannot be read may need any but those of a later generation.
        """
        named = [entry.name for entry in self._lease.head.checkpoints]
        known = [name for name in named if name in self._manifests]
        unknown = {*named}.difference(known)
        spared = max((generation_in(name) for name in unknown), default=0)
        needed: set[str] = set().union(*(self._manifests[name].blobs for name in known))
        self._delete({blob for blob in self._there - needed if generation_in(blob) > spared})
        self._manifests = {name: self._manifests[name] for name in known}

    def delete_unpublished(self, blobs: Iterable[str]) -> None:
        """Delete blobs of a snapshot whose publication was never tried."""
        self._there |= set(blobs)
        self._delete(set(blobs))

    def copy_shared(self, num_snapshots: int) -> None:
        """Store a second copy of each blob that all snapshots need, once there are `num_snapshots`.

        Copies at most what one snapshot needs, each byte once, in one thread nothing waits for.
        """
        head = self._lease.head
        kept = [self._manifests.get(e.name) for e in head.checkpoints if not e.is_left_behind]
        known = [manifest for manifest in kept if manifest is not None]
        if len(known) < len(kept) or len(kept) < num_snapshots:
            return
        shared = set(known[0].blobs).intersection(*(one.blobs for one in known))
        if not self._copying.acquire(blocking=False):
            return
        try:
            for blob in sorted(shared - self._copied - self._damaged):
                self._copy(blob, known[-1])
        except CancelledError:
            pass  # the next commit or attempt does it
        except StoreError as error:
            _log.warning(f"[second copy] {error}; retrying after the next commit")
        finally:
            self._copying.release()

    def _copy(self, blob: str, manifest: FolderManifest) -> None:
        contents = [one for one in manifest.contents.values() if one.blob == blob]
        source = _StoredBlob(self._store, blob, manifest.blobs[blob], contents)
        progress = TransferProgress(stop=self.stop_copying)
        try:
            (sent,) = send(self._store, BLOBS, [source], progress, num_threads=1)
            source.refuse_damaged(sent.sha256)
        except (DamagedCheckpointError, FileNotFoundError) as error:
            if blob in self._there:  # else it was deleted meanwhile
                _log.warning(f"[second copy] {blob} is damaged ({error}); its files are sent again")
                self._store.delete([second_key(blob)])
                self.found_damaged([blob])
            return
        finally:  # also of one that was stopped after it arrived
            if blob not in self._there:  # no snapshot needs it any more
                self._store.delete([second_key(blob)])
        self._copied.add(blob)

    def _delete(self, blobs: set[str]) -> None:
        keys = [key(blob) for blob in sorted(blobs) for key in (blob_key, second_key)]
        self._there -= blobs  # first: a second copy that arrives meanwhile must see it
        try:
            self._store.delete(keys)
        except StoreError as error:
            _log.warning(f"[retention] {error}; retrying")
            self._there |= blobs

    def _read_unknown(self) -> None:
        for entry in self._lease.head.checkpoints:
            if entry.name not in self._manifests:
                try:
                    found = read_twice(entry, partial(read_manifest, self._store, entry))
                except DamagedCheckpointError as error:
                    _log.warning(f"[sweep] snapshot {entry.name}: {error}")
                    continue
                self.add(entry.name, found)


class _StoredBlob(Contents):
    """A blob in the store as the contents of its second copy, verified as it is read."""

    is_named_by_content = True

    def __init__(self, store: Store, blob: str, size: int, contents: Collection[Content]) -> None:
        self.name = second_key(blob).removeprefix(BLOBS)
        self._store, self._key, self._size = store, blob_key(blob), size
        self._contents = contents

    @property
    def size(self) -> int:
        return self._size

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        data = spare(stop - start)
        self._store.read_into(self._key, start, data)
        for one in self._contents:  # the files of a pack, or the single file of another blob
            own = data[one.start - start : one.start - start + one.bytes]
            if one.bytes < self._size and hashlib.sha256(own).hexdigest() != one.sha256:
                raise DamagedCheckpointError("a file in it does not match its SHA-256")
        return data

    def refuse_damaged(self, sha256: str) -> None:
        """Raise DamagedCheckpointError if the one file that it holds has another checksum."""
        if any(one.bytes == self._size and one.sha256 != sha256 for one in self._contents):
            raise DamagedCheckpointError("it does not match its SHA-256")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """A capture whose contents are all in the store."""

    manifest: FolderManifest
    files: Mapping[FileState, Content]  # those whose times show whether they changed
    changed_bytes: int
    sent_bytes: int


class FolderSave(Save):
    """A save of one capture; once its contents are in the store, later tries reuse `sent`."""

    def __init__(
        self, saves: "FolderSaves", capture: Capture, kind: Kind, *, is_tentative: bool
    ) -> None:
        # A capture in place is not retried: the program waits for it.
        super().__init__(failed=None if capture.is_in_place else saves.failed)
        self.capture = capture
        self.sent: _Sent | None = None
        self.new_blobs: dict[str, int] = {}
        self._saves = saves
        self._store, self._blobs = saves.publisher.store, saves.blobs
        self._kind = kind
        self._is_tentative = is_tentative  # it may hold half of a save
        self._known = capture.known
        self._generation = 0
        self._name = ""
        self._num_threads = min(_MAX_THREADS, self._store.num_threads)

    @property
    def num_bytes(self) -> int:
        """Bytes that were sent."""
        return self.sent.sent_bytes if self.sent else 0

    def entry_after(self, head: Head) -> CheckpointEntry:
        """Return an entry with the run's next number, under a new name at each try."""
        number = max((entry.step for entry in head.checkpoints), default=0) + 1
        self._generation = head.generation
        self._name = checkpoint_name(number, head.generation)
        return CheckpointEntry(
            name=self._name,
            step=number,
            stage=_STAGE,
            epoch=0,
            kind=self._kind,
            files=(),
            is_tentative=self._is_tentative,
            program_step=self.capture.program_step,
        )

    def send(self, name: str, tasks: Sequence[Callable[[], None]]) -> tuple[FileEntry, ...] | None:
        """Send what is new, then snapshot.json; may also raise ChangedError."""
        self.sent = self.sent or self._send_contents()
        manifest = self.sent.manifest
        self._blobs.add(name, manifest)  # first: a task may fail, and it be given up
        for task in tasks:
            task()
        if manifest.holds_no_more_than(self._blobs.newest):
            return None
        return (put_text(self._store, checkpoint_prefix(name), SNAPSHOT, manifest.to_bytes()),)

    def publish(self) -> None:
        """Send and commit it, and remember what the store then has."""
        if self._saves.error is not None:
            raise self._saves.error
        self.began = time.monotonic()
        try:
            self._saves.publisher.publish(self)
            self._saves.know(self)
        except SnapshotError as error:
            if not self.capture.is_in_place:  # else whoever captured it tries again
                _log.warning(f"[snapshot] void: {error}")
            raise
        except (StoreError, CancelledError):
            raise
        except BaseException as error:  # the attempt's thread must see it
            self._saves.error = error
            raise

    def settle(self) -> None:
        """Report a refusal, or delete what is no longer kept and store second copies."""
        publisher, blobs = self._saves.publisher, self._blobs
        publisher.settle(self)
        if self.is_committed and not blobs.stop_copying.is_set():
            blobs.copy_shared(max(2, publisher.retention.newest))

    def discard(self) -> None:
        """Delete the copies."""
        self.capture.discard()

    def facts(self) -> Mapping[str, Any]:
        """Return what was sent, and when the program last changed one of its files, logs aside."""
        assert self.sent is not None
        listing, is_grown = self.capture.listing, self.capture.reason == "appended"
        return {
            "snapshot": self._name,
            "reason": self.capture.reason,
            "num_files": len(self.sent.manifest.files),
            "changed_bytes": self.sent.changed_bytes,
            "sent_bytes": self.sent.sent_bytes,
            "written_at": (listing.began_ns if is_grown else listing.written_ns) / 1e9,
            "note": self.capture.note,
        }

    def _send_contents(self) -> _Sent:
        self.new_blobs.clear()
        self._known = self._blobs.known.with_earlier(self.capture.known)
        try:
            with self._logging_progress():
                sent = self._hash_and_send()
            if self.capture.is_in_place:
                self.capture.refuse_changed(self._saves.root)
            needed = sent.manifest.blobs.keys()
            if needed - self._blobs.known.blobs.keys() - self.new_blobs.keys():
                # A folder was moved away, left out of the last snapshot, and moved back.
                raise ChangedError("a file that it left out was deleted after its capture")
            return sent
        except BaseException:
            self._blobs.delete_unpublished(self.new_blobs)
            raise

    def _hash_and_send(self) -> _Sent:
        fresh = self._hash()
        placed = dict(self._known.contents)
        missing = {one.sha256: one for one in fresh.values() if one.sha256 not in placed}
        placed |= self._send_files(list(missing.values()))
        contents = {
            path: replace(placed[one.sha256], extents=one.extents) for path, one in fresh.items()
        }
        listing = self.capture.listing
        for path, state in listing.files.items():
            if path not in contents:
                contents[path] = self._known.files[state]
        return _Sent(
            manifest=self._manifest(contents),
            files={
                state: contents[path]
                for path, state in listing.files.items()
                if path not in self.capture.mapped and not listing.is_log(path)
            },
            changed_bytes=sum(one.size for one in set(fresh.values())),
            sent_bytes=sum(self.new_blobs.values()),
        )

    def _hash(self) -> dict[str, CapturedFile]:
        found: dict[Path, CapturedFile] = {}
        for path, source in self.capture.sources.items():
            if source in found:
                continue
            # A log may have grown before it was copied.
            is_copy = self.capture.staging is not None
            size = source.stat().st_size if is_copy else self.capture.listing.files[path].bytes
            found[source] = CapturedFile(path, source, size)
        tasks = [task for one in found.values() for task in one.hashing()]
        run_all(tasks, self._num_threads, self.progress.stop)
        return {path: found[source] for path, source in self.capture.sources.items()}

    def _send_files(self, files: Sequence[CapturedFile]) -> dict[str, Content]:
        """Send the files; return where they are now, by checksum."""
        self.progress.total_bytes = sum(one.size for one in files)
        placed = {one.sha256: one.content(None) for one in files if not one.size}
        blobs: list[Contents] = []
        for pack in packed([one for one in files if 0 < one.size <= SMALL_BYTES]):
            blobs.append(Pack(pack))
            blobs[-1].name = self._new_blob(blobs[-1].size)
            starts = itertools.accumulate((one.size for one in pack), initial=0)
            for one, start in zip(pack, starts, strict=False):
                placed[one.sha256] = one.content(blobs[-1].name, start)
        for one in files:
            if one.size > SMALL_BYTES:
                one.name = self._new_blob(one.size)
                placed[one.sha256] = one.content(one.name)
                blobs.append(one)
        send(self._store, BLOBS, blobs, self.progress, num_threads=self._num_threads)
        return placed

    def _new_blob(self, size: int) -> str:
        name = f"g{self._generation:04d}-{secrets.token_hex(8)}"
        self.new_blobs[name] = size
        return name

    def _manifest(self, contents: Mapping[str, Content]) -> FolderManifest:
        capture, listing = self.capture, self.capture.listing
        sizes = {**self._known.blobs, **self.new_blobs}
        needed = sorted({content.blob for content in contents.values() if content.blob})
        return FolderManifest(
            reason="quiet" if capture.reason == "appended" else capture.reason,
            program_says_when=capture.program_says_when,
            files=tuple(
                SavedFile(path=path, mode=f.mode, mtime_ns=f.mtime_ns, content=contents[path])
                for path, f in listing.files.items()
            ),
            links=tuple(SavedLink(path=path, target=to) for path, to in listing.links.items()),
            folders=tuple(
                SavedFolder(path=path, mode=f.mode, mtime_ns=f.mtime_ns)
                for path, f in listing.folders.items()
            ),
            blobs={blob: sizes[blob] for blob in needed},
            note={**capture.note, **places_of(self._saves.root)},
            hard_links=listing.hard_links,
        )

    @contextmanager
    def _logging_progress(self) -> Iterator[None]:
        """Log the progress every ten seconds."""
        is_over, progress = threading.Event(), self.progress

        def report() -> None:
            while not is_over.wait(_LINE_SECONDS):
                done, total = progress.done_bytes / 1e6, progress.total_bytes / 1e6
                _log.info(f"[save] {done:,.0f} of {total:,.0f} MB sent")

        progress.done_bytes = progress.total_bytes = 0
        thread = threading.Thread(target=report, name="save-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedSnapshot:
    """A snapshot that the head names."""

    number: int
    seconds: float  # from its capture to the head
    written_at: float  # unix seconds: when the program last changed a file of it, logs aside
    num_files: int
    changed_bytes: int  # of files that had changed
    sent_bytes: int
    snapshot: str  # its name
    reason: Reason
    note: Mapping[str, Any]


class FolderSaves:
    """Commits one capture after another; the blobs know what the store already has."""

    def __init__(self, publisher: CheckpointPublisher, root: Root, blobs: Blobs) -> None:
        self.last: CommittedSnapshot | None = None
        self.error: BaseException | None = None  # what has ended the saves
        self.root = root
        self.publisher, self.blobs = publisher, blobs
        self.failed = FailedSaves()
        self._newest: FolderSave | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False

    @property
    def refusal(self) -> StoreError | None:
        """The store's error if it refused the newest save."""
        error = self._newest.error if self._newest is not None else None
        return error if isinstance(error, StoreError) else None

    def start(self, save: FolderSave) -> None:
        """Send this next, instead of one that is waiting."""
        with self._lock:
            before, self._newest = self._newest, save
            if self._is_cancelled:
                save.cancel()
            save.start(after=before)
        if before is not None:
            before.give_way()

    def give_way(self) -> None:
        """Drop the newest save if it is waiting."""
        if self._newest is not None:
            self._newest.give_way()

    def _unfinished(self) -> Iterator[Save]:
        """Yield the saves that may not be over yet, newest first."""
        with self._lock:
            save: Save | None = self._newest
        while save is not None:
            yield save
            save = save.earlier

    def finish(self, deadline: float | None) -> bool:
        """Let pending saves try again until the deadline; return whether all are over."""
        self.blobs.stop_copying.set()
        for save in self._unfinished():
            save.hurry(deadline or 0.0)
            if not save.wait(seconds_until(deadline)):
                return False
        return True

    def cancel(self) -> None:
        """Prevent any save from being published, now and later, unless it already is."""
        self.blobs.stop_copying.set()
        with self._lock:
            self._is_cancelled = True
        for save in self._unfinished():
            if not save.cancel():
                save.wait()  # the head is being written, which is bounded

    def know(self, save: FolderSave) -> None:
        """Note that the store has it now, whether or not anything had changed."""
        sent, entry = save.sent, save.entry
        assert sent is not None
        assert entry is not None
        self.blobs.begin_with(sent.manifest, sent.files)
        if save.cost is None:  # nothing had changed, and no head was written
            return
        seconds = save.cost.seconds
        self.last = CommittedSnapshot(number=entry.step, seconds=seconds, **save.facts())
        self.publisher.record(save, step=sent.manifest.note.get("step"))
        if not save.releases:  # else the successor does it: now seconds count
            self.blobs.delete_unneeded()
