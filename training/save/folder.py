"""A folder as what a save sends: what the store lacks, large files in parts, small ones packed.

A request takes 20 to 100 ms however small its object is, and costs as much as any other: 10,000
small files in packs are some dozen requests (docs/checkpoints.md has the figures). Memory: one pack
or part per thread.
"""

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from contract.keys import blob_key, checkpoint_prefix
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
from training.store import parts
from training.store.parts import Progress, checksum_of, num_parts, part_bytes_of, run_all
from training.store.protocol import Store, Upload

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hashed:
    """A file that was captured."""

    path: str
    source: Path
    size: int
    part_bytes: int
    digests: Sequence[bytes]  # of its parts

    @property
    def sha256(self) -> str:
        return checksum_of(self.digests)

    def read(self, start: int, size: int) -> bytes:
        """Some of its bytes; ChangedError if it has become shorter."""
        try:
            with self.source.open("rb", buffering=0) as stream:
                stream.seek(start)
                data = stream.read(size)
                while len(data) < size and (more := stream.read(size - len(data))):
                    data += more
        except FileNotFoundError as error:
            raise ChangedError(f"{self.path!r} was deleted while it was sent") from error
        except OSError as error:
            raise unreadable(error) from error
        if len(data) < size:
            raise ChangedError(f"{self.path!r} became shorter while it was sent")
        return data

    def hash_part(self, number: int) -> None:
        start = number * self.part_bytes
        data = self.read(start, min(self.part_bytes, self.size - start))
        assert isinstance(self.digests, list)
        self.digests[number] = hashlib.sha256(data).digest()


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
        self._progress = Progress()
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
        self, name: str, progress: Progress, beside: Sequence[Callable[[], None]]
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

    def _hash(self) -> list[_Hashed]:
        found = []
        for path, source in self.capture.sources.items():
            # A log may have grown before it was copied.
            is_copy = self.capture.staging is not None
            size = source.stat().st_size if is_copy else self.capture.listing.files[path].bytes
            part_bytes = part_bytes_of(size)
            digests = [b""] * num_parts(size, part_bytes)
            one = _Hashed(
                path=path, source=source, size=size, part_bytes=part_bytes, digests=digests
            )
            found.append(one)
        tasks = [
            partial(one.hash_part, number) for one in found for number in range(len(one.digests))
        ]
        run_all(tasks, self._num_threads, self._progress.stop)
        return found

    def _send_files(self, files: Sequence[_Hashed]) -> dict[str, Content]:
        """Send the files; where they now lie, by checksum."""
        self._progress.total_bytes = sum(one.size for one in files)
        placed = {one.sha256: _content(one, None) for one in files if not one.size}
        uploads: list[Upload] = []
        tasks = []
        for pack in _packs([one for one in files if 0 < one.size <= SMALL_BYTES]):
            blob, start = self._new_blob(sum(one.size for one in pack)), 0
            for one in pack:
                placed[one.sha256] = _content(one, blob, start)
                start += one.size
            tasks.append(partial(self._put_pack, blob, pack))
        for one in files:
            if one.size <= SMALL_BYTES:
                continue
            blob = self._new_blob(one.size)
            placed[one.sha256] = _content(one, blob)
            if len(one.digests) == 1:
                tasks.append(partial(self._put_pack, blob, [one]))
            else:
                upload = self._upload(blob, one.size, one.part_bytes)
                uploads.append(upload)
                tasks += [partial(self._put_part, upload, one, n) for n in range(len(one.digests))]
        try:
            run_all(tasks, self._num_threads, self._progress.stop)
            run_all([u.finish for u in uploads], self._num_threads, self._progress.stop)
        except BaseException:
            for upload in uploads:
                upload.abort()
            raise
        return placed

    def _put_pack(self, blob: str, pack: Sequence[_Hashed]) -> None:
        data = b"".join(one.read(0, one.size) for one in pack)
        upload = self._upload(blob, len(data), len(data))
        try:
            upload.put(0, 0, memoryview(data), hashlib.sha256(data).digest())
            upload.finish()
        except BaseException:
            upload.abort()
            raise
        self._progress.add(len(data))

    def _put_part(self, upload: Upload, one: _Hashed, number: int) -> None:
        start = number * one.part_bytes
        data = one.read(start, min(one.part_bytes, one.size - start))
        upload.put(number, start, memoryview(data), one.digests[number])
        self._progress.add(len(data))

    def _upload(self, blob: str, size: int, part_bytes: int) -> Upload:
        return self._store.upload(blob_key(blob), size, part_bytes, self._progress.stop)

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


def _packs(files: Sequence[_Hashed]) -> Iterator[list[_Hashed]]:
    """Files that follow each other, together up to one part."""
    pack: list[_Hashed] = []
    size = 0
    for one in files:
        if pack and size + one.size > parts.PART_BYTES:
            yield pack
            pack, size = [], 0
        pack.append(one)
        size += one.size
    if pack:
        yield pack


def _content(one: _Hashed, blob: str | None, start: int = 0) -> Content:
    return Content(
        bytes=one.size, sha256=one.sha256, part_bytes=one.part_bytes, blob=blob, start=start
    )
