"""A folder as what a save sends: what the store lacks, large files in parts, small ones packed.

A request takes 20 to 100 ms however small its object is, and costs as much as any other: 10,000
small files in packs are some dozen requests (docs/checkpoints.md has the figures). Memory: one pack
or part per thread.
"""

import hashlib
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from contract.keys import BLOBS, checkpoint_prefix
from training.record.checkpoint_entry import CheckpointEntry, FileEntry, Kind, checkpoint_name
from training.record.head import Head
from training.save.blobs import Blobs
from training.save.capture import Capture, unreadable
from training.save.listing import ChangedError, FileState, is_log
from training.save.manifest import (
    SMALL_BYTES,
    SNAPSHOT,
    Content,
    FolderManifest,
    SavedFile,
    SavedFolder,
    SavedLink,
)
from training.save.transfer import Contents, Spare, send
from training.store import parts
from training.store.parts import TransferProgress, checksum_of, num_parts, part_bytes_of, run_all
from training.store.protocol import Store

_log = logging.getLogger(__name__)

# What the head calls the one stage of a program.
STAGE = "program"
_LINE_SECONDS = 10.0
# More threads bring little, and each holds a part.
_MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A capture whose contents are all in the store."""

    manifest: FolderManifest
    files: Mapping[FileState, Content]  # those whose times tell whether they changed
    num_changed: int
    changed_bytes: int
    sent_bytes: int


class _CapturedFile(Contents):
    """A file that was captured: hashed first, because the store may have its contents already."""

    def __init__(self, path: str, source: Path, size: int) -> None:
        self.path = path
        self.name = ""  # the blob that it becomes
        self.part_bytes = part_bytes_of(size)
        self._source = source
        self._size = size
        self._digests = [b""] * num_parts(size, self.part_bytes)

    @property
    def size(self) -> int:
        return self._size

    @property
    def sha256(self) -> str:
        """The checksum, once all is hashed."""
        return checksum_of(self._digests)

    def hashing(self) -> Iterator[Callable[[], None]]:
        """A task for each part."""
        return (partial(self._hash, part) for part in range(len(self._digests)))

    def _hash(self, part: int) -> None:
        start = part * self.part_bytes
        data = self.read(start, min(start + self.part_bytes, self.size))
        self._digests[part] = hashlib.sha256(data).digest()

    def read(self, start: int, stop: int, spare: Spare | None = None) -> memoryview:
        """Some of its bytes; ChangedError if it has become shorter."""
        try:
            with self._source.open("rb", buffering=0) as stream:
                stream.seek(start)
                data = stream.read(stop - start)
                while len(data) < stop - start and (more := stream.read(stop - start - len(data))):
                    data += more
        except FileNotFoundError as error:
            raise ChangedError(f"{self.path!r} was deleted while it was sent") from error
        except OSError as error:
            raise unreadable(error) from error
        if len(data) < stop - start:
            raise ChangedError(f"{self.path!r} became shorter while it was sent")
        return memoryview(data)

    def digest(self, part: int, data: memoryview) -> bytes:
        return self._digests[part]

    def content(self, blob: str | None, start: int = 0) -> Content:
        """Its contents as they lie in a blob."""
        return Content(
            bytes=self.size, sha256=self.sha256, part_bytes=self.part_bytes, blob=blob, start=start
        )


class _Pack(Contents):
    """Small files that are stored as one blob, of one part."""

    def __init__(self, files: Sequence[_CapturedFile]) -> None:
        self._files = files

    @property
    def size(self) -> int:
        return sum(file.size for file in self._files)

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        return memoryview(b"".join(file.read(0, file.size) for file in self._files))


class FolderSource:
    """One capture of a folder; `sent` once its contents are in the store, for every later try."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        capture: Capture,
        root: Path,
        kind: Kind,
        *,
        is_tentative: bool = False,
    ) -> None:
        self.capture = capture
        self.sent: Sent | None = None
        self.new_blobs: dict[str, int] = {}
        self._store = store
        self._blobs = blobs
        self._root = root
        self._kind = kind
        self._is_tentative = is_tentative  # it may hold half of a save
        self._known = capture.known
        self._generation = 0
        self._name = ""
        self._progress = TransferProgress()
        self._num_threads = min(_MAX_THREADS, store.num_threads)

    @property
    def num_bytes(self) -> int:
        """Bytes that were sent."""
        return self.sent.sent_bytes if self.sent else 0

    def entry(self, head: Head) -> CheckpointEntry:
        """The next number of the run, under a new name at each try."""
        number = max((entry.step for entry in head.checkpoints), default=0) + 1
        self._generation = head.generation
        self._name = checkpoint_name(number, head.generation)
        return CheckpointEntry(
            name=self._name,
            step=number,
            stage=STAGE,
            epoch=0,
            kind=self._kind,
            files=(),
            is_tentative=self._is_tentative,
        )

    def send(
        self, name: str, progress: TransferProgress, beside: Sequence[Callable[[], None]]
    ) -> tuple[FileEntry, ...] | None:
        """Send what is new, then snapshot.json; may also raise ChangedError."""
        self._progress = progress
        self.sent = self.sent or self._send_contents()
        for task in beside:
            task()
        manifest = self.sent.manifest
        if manifest.holds_no_more_than(self._blobs.newest):
            return None
        data = manifest.to_bytes()
        self._blobs.add(name, manifest)
        self._store.put(checkpoint_prefix(name) + SNAPSHOT, data)
        return (FileEntry(name=SNAPSHOT, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()),)

    def discard(self) -> None:
        """Delete the copies."""
        self.capture.discard()

    def facts(self) -> Mapping[str, Any]:
        """What was sent, and when the program last changed a file of it, logs aside."""
        assert self.sent is not None
        return {
            "snapshot": self._name,
            "num_files": len(self.sent.manifest.files),
            "changed_bytes": self.sent.changed_bytes,
            "sent_bytes": self.sent.sent_bytes,
            "written_at": self.capture.listing.written_ns / 1e9,
            "note": self.capture.note,
        }

    def _send_contents(self) -> Sent:
        self.new_blobs.clear()
        self._known = self._blobs.known.with_earlier(self.capture.known)
        try:
            with self._telling_progress():
                sent = self._hash_and_send()
            if self.capture.is_in_place:
                self.capture.refuse_changed(self._root)
            needed = sent.manifest.blobs.keys()
            if needed - self._blobs.known.blobs.keys() - self.new_blobs.keys():
                # A folder was moved away, left out of the last snapshot, and moved back.
                raise ChangedError("what was left out of it is deleted since its capture")
            return sent
        except BaseException:
            self._blobs.delete_unpublished(self.new_blobs)
            raise

    def _hash_and_send(self) -> Sent:
        fresh = self._hash()
        placed = dict(self._known.contents)
        missing = {one.sha256: one for one in fresh if one.sha256 not in placed}
        placed |= self._send_files(list(missing.values()))
        contents = {one.path: placed[one.sha256] for one in fresh}
        listing = self.capture.listing
        for path, state in listing.files.items():
            if path not in contents:
                contents[path] = self._known.files[state]
        return Sent(
            manifest=self._manifest(contents),
            files={
                state: contents[path]
                for path, state in listing.files.items()
                if path not in self.capture.mapped and not is_log(path)
            },
            num_changed=len(fresh),
            changed_bytes=sum(one.size for one in fresh),
            sent_bytes=sum(self.new_blobs.values()),
        )

    def _hash(self) -> list[_CapturedFile]:
        found = []
        for path, source in self.capture.sources.items():
            # A log may have grown before it was copied.
            is_copy = self.capture.staging is not None
            size = source.stat().st_size if is_copy else self.capture.listing.files[path].bytes
            found.append(_CapturedFile(path, source, size))
        tasks = [task for one in found for task in one.hashing()]
        run_all(tasks, self._num_threads, self._progress.stop)
        return found

    def _send_files(self, files: Sequence[_CapturedFile]) -> dict[str, Content]:
        """Send the files; where they now lie, by checksum."""
        self._progress.total_bytes = sum(one.size for one in files)
        placed = {one.sha256: one.content(None) for one in files if not one.size}
        blobs: list[Contents] = []
        for pack in _packs([one for one in files if 0 < one.size <= SMALL_BYTES]):
            blobs.append(_Pack(pack))
            blobs[-1].name = self._new_blob(blobs[-1].size)
            starts = itertools.accumulate((one.size for one in pack), initial=0)
            for one, start in zip(pack, starts, strict=False):
                placed[one.sha256] = one.content(blobs[-1].name, start)
        for one in files:
            if one.size > SMALL_BYTES:
                one.name = self._new_blob(one.size)
                placed[one.sha256] = one.content(one.name)
                blobs.append(one)
        send(self._store, BLOBS, blobs, self._progress, num_threads=self._num_threads)
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
            reason=capture.reason,
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
            note=capture.note,
        )

    @contextmanager
    def _telling_progress(self) -> Iterator[None]:
        """Log how far it is, every ten seconds."""
        is_over, progress = threading.Event(), self._progress

        def tell() -> None:
            while not is_over.wait(_LINE_SECONDS):
                done, total = progress.done_bytes / 1e6, progress.total_bytes / 1e6
                _log.info(f"[save] {done:,.0f} of {total:,.0f} MB sent")

        progress.done_bytes = progress.total_bytes = 0
        thread = threading.Thread(target=tell, name="save-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _packs(files: Sequence[_CapturedFile]) -> Iterator[list[_CapturedFile]]:
    """Files that follow each other, together up to one part."""
    pack: list[_CapturedFile] = []
    size = 0
    for one in files:
        if pack and size + one.size > parts.PART_BYTES:
            yield pack
            pack, size = [], 0
        pack.append(one)
        size += one.size
    if pack:
        yield pack
