"""Sends what a capture has and the store has not: large files in parts, small ones packed.

A request takes 20 to 100 ms however small its object is, and costs as much as any other: 10,000
small files in packs are some dozen requests (docs/checkpoints.md has the figures). Memory: one pack
or part per thread.
"""

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from contract.keys import blob_key
from training.save.capture import Capture, unreadable
from training.save.known import Known
from training.save.listing import ChangedError, FileState, is_log
from training.save.manifest import Content, SavedFile, SavedFolder, SavedLink, Snapshot
from training.store import parts
from training.store.parts import TransferProgress, checksum_of, num_parts, part_bytes_of, run_all
from training.store.protocol import Store, Upload

# Larger files are objects of their own.
SMALL_BYTES = 1024 * 1024
# More threads bring little, and each holds a part.
_MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A snapshot whose contents are all in the store."""

    snapshot: Snapshot
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


class Sending:
    """One capture on its way to the store."""

    def __init__(
        self,
        store: Store,
        capture: Capture,
        known: Known,
        generation: int,
        progress: TransferProgress,
    ) -> None:
        self.new_blobs: dict[str, int] = {}
        self._store = store
        self._capture = capture
        self._known = known
        self._generation = generation
        self._progress = progress
        self._num_threads = min(_MAX_THREADS, store.num_threads)

    def run(self) -> Sent:
        """Hash what is new, send what the store has not."""
        fresh = self._hash()
        placed = dict(self._known.contents)
        missing = {one.sha256: one for one in fresh if one.sha256 not in placed}
        placed |= self._send(list(missing.values()))
        contents = {one.path: placed[one.sha256] for one in fresh}
        listing = self._capture.listing
        for path, state in listing.files.items():
            if path not in contents:
                contents[path] = self._known.files[state]
        return Sent(
            snapshot=self._snapshot(contents),
            files={
                state: contents[path]
                for path, state in listing.files.items()
                if path not in self._capture.mapped and not is_log(path)
            },
            num_changed=len(fresh),
            changed_bytes=sum(one.size for one in fresh),
            sent_bytes=sum(self.new_blobs.values()),
        )

    def _hash(self) -> list[_Hashed]:
        found = []
        for path, source in self._capture.sources.items():
            # A log may have grown before it was copied.
            is_copy = self._capture.staging is not None
            size = source.stat().st_size if is_copy else self._capture.listing.files[path].bytes
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

    def _send(self, files: Sequence[_Hashed]) -> dict[str, Content]:
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

    def _snapshot(self, contents: Mapping[str, Content]) -> Snapshot:
        capture, listing = self._capture, self._capture.listing
        sizes = {**self._known.blobs, **self.new_blobs}
        needed = sorted({content.blob for content in contents.values() if content.blob})
        return Snapshot(
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
