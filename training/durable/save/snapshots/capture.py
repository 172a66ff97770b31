"""A folder as it was at one moment, safe from later writes.

Clones where the file system can (FICLONE copies no bytes), else copies where there is room, else
uses the folder itself, which must then not change until it is sent. Known contents are left out.
"""

import fcntl
import hashlib
import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from training.durable.save.snapshots.listing import (
    ChangedError,
    FileState,
    Listing,
    Root,
    SnapshotError,
    list_folder,
    settled,
)
from training.durable.save.snapshots.processes import held_open, mapped_for_writing
from training.durable.save.snapshots.snapshot import (
    Content,
    Extents,
    FolderManifest,
    Reason,
    data_of,
)
from training.durable.store.transfer import (
    PART_BYTES,
    Contents,
    Spare,
    checksum_of,
    num_parts,
    part_bytes_of,
)

_log = logging.getLogger(__name__)

_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
# Copies must leave the program room for its next files.
_LEFT_BYTES = 256 * 1024 * 1024
# The longest standstill of a program whose files cannot be cloned.
_STANDSTILL_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """Contents in the store, by the files that they were seen in and by their checksums."""

    files: Mapping[FileState, Content] = field(default_factory=dict)
    contents: Mapping[str, Content] = field(default_factory=dict)
    blobs: Mapping[str, int] = field(default_factory=dict)  # name -> bytes

    def with_earlier(self, earlier: "Known") -> "Known":
        """Return this with what an earlier capture knew, and therefore left out."""
        files, blobs = {**earlier.files, **self.files}, {**earlier.blobs, **self.blobs}
        return replace(self, files=files, blobs=blobs)

    def without(self, blobs: Collection[str]) -> "Known":
        """Return this without the contents of these blobs."""
        files = {state: one for state, one in self.files.items() if one.blob not in blobs}
        contents = {sha: one for sha, one in self.contents.items() if one.blob not in blobs}
        return replace(self, files=files, contents=contents)

    @classmethod
    def after(cls, manifest: FolderManifest, files: Mapping[FileState, Content]) -> "Known":
        """Return what the next snapshot may use: no blob of which this one needs less than half.

        Contents of such a blob are captured and sent again, so at most half of the store is waste.
        """
        needed = Counter[str]()
        for content in manifest.contents.values():
            if content.blob is not None:
                needed[content.blob] += content.bytes
        wasteful = {blob for blob, count in needed.items() if 2 * count < manifest.blobs[blob]}
        known = cls(files=files, contents=manifest.contents, blobs=manifest.blobs)
        return known.without(wasteful)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The conditions that the folder must meet when it is captured."""

    # The folder as it was found quiet; a file may have been begun since.
    quiet: Listing | None = None
    # When the program asked, by the clock that stamps files; it may have gone on writing.
    asked_ns: int | None = None
    # The program may have been in the middle of a save.
    is_tentative: bool = False
    # The program is stopped for it: nothing it keeps open is complete.
    is_standstill: bool = False
    # Nothing may be open for writing: a moment between two writes of a program that never rests.
    is_closed: bool = False
    # Files that only grow, by how they have been written.
    logs: frozenset[str] | None = None
    # What `quiet` and `is_closed` are about: replaced files are whole at any time.
    in_place: Callable[[Listing], Listing] = lambda listing: listing
    # Whether what is closed was closed by a death.
    has_died: Callable[[], bool] = lambda: False

    def refuse_other(self, listing: Listing) -> None:
        """Raise ChangedError or SnapshotError if the moment is over."""
        in_place = self.in_place(listing)
        if self.quiet is not None and (path := self.quiet.difference(in_place)):
            raise ChangedError(f"{path!r} changed")
        if self.is_closed and (held := held_open(in_place)):
            raise ChangedError(f"{held} was open for writing")
        if self.is_closed and self.has_died():
            raise ChangedError("a process that wrote to it has died")
        if self.asked_ns is not None and (newer := listing.changed_after(self.asked_ns)):
            raise SnapshotError(
                f"the program asked for a snapshot, but changed {newer!r} before it was taken; "
                "after touching the commit file, wait until it is gone"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """The content to send, and where to read it."""

    reason: Reason
    program_says_when: bool
    listing: Listing
    sources: Mapping[str, Path]  # path -> the file to read, for what was not known
    staging: Path | None  # None: the sources are the folder's own files
    known: Known  # what was left out because of it
    # Changed in memory, which leaves their times unchanged: read again every time.
    mapped: frozenset[str] = frozenset()
    note: Mapping[str, Any] = field(default_factory=dict)

    @property
    def program_step(self) -> int | None:
        """The step that the program had reported, if it reports any."""
        step = self.note.get("step")
        return None if step is None else max(0, step)

    @property
    def is_in_place(self) -> bool:
        """Whether it is valid only as long as the folder does not change."""
        return self.staging is None and bool(self.sources)

    def discard(self) -> None:
        """Delete the copies."""
        if self.staging is not None:
            shutil.rmtree(self.staging, ignore_errors=True)

    def refuse_changed(self, root: Root) -> None:
        """Raise ChangedError if the folder is no longer what was listed."""
        if path := self.listing.difference(list_folder(root, self.listing.logs)):
            raise ChangedError(f"{path!r} changed while it was captured")


def capture(
    root: Root,
    staging: Path,
    known: Known,
    *,
    reason: Reason,
    program_says_when: bool,
    note: Mapping[str, Any],
    moment: Moment,
    in_place: bool = False,
) -> Capture:
    """Capture the folder below `staging`, a new folder; ChangedError if it changes during that.

    A capture in place is valid only as long as the folder does not change (`refuse_changed`).
    """
    listing = settled(root, moment.logs)
    moment.refuse_other(listing)
    inodes = mapped_for_writing({f.file for f in listing.files.values()})
    mapped = frozenset(p for p, f in listing.files.items() if f.file in inodes)
    new = [
        path
        for path, file in listing.files.items()
        if file not in known.files or path in mapped or listing.is_log(path)
    ]
    # One name of each file: what has several, by hard links, is read once.
    names = {f.file: root / path for path, f in reversed(listing.files.items())}
    own = {path: names[listing.files[path].file] for path in new}
    copied = None if in_place else _copied(own, staging, listing, moment)
    captured = Capture(
        reason=reason,
        program_says_when=program_says_when,
        listing=listing,
        sources=own if copied is None else copied,
        staging=None if copied is None else staging,
        known=known,
        mapped=mapped,
        note=note,
    )
    try:
        captured.refuse_changed(root)
    except SnapshotError:
        captured.discard()
        raise
    return captured


def _copied(
    own: Mapping[str, Path], staging: Path, listing: Listing, moment: Moment
) -> dict[str, Path] | None:
    """Clone or copy the files; None if there is no room, or SnapshotError at a standstill."""
    if not own:
        return {}
    ends = time.monotonic() + _STANDSTILL_SECONDS if moment.is_standstill else math.inf
    sizes = {source: listing.files[path].bytes for path, source in own.items()}
    need, copies = sum(sizes.values()), {source: staging / str(n) for n, source in enumerate(sizes)}
    try:
        staging.mkdir(parents=True)
        if not _has_room(staging, need):
            staging.rmdir()
            if moment.is_standstill:
                raise SnapshotError(f"no room is left for a copy of {need / 1e6:,.1f} MB")
            return None
        for source, copy in copies.items():
            _copy(source, copy, ends)
    except (OSError, SnapshotError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, SnapshotError):
            raise
        if isinstance(error, FileNotFoundError):
            raise ChangedError(f"{error.filename} was deleted while it was captured") from error
        if isinstance(error, PermissionError):
            raise _unreadable(error) from error
        if moment.is_standstill:  # no room after all
            raise SnapshotError(f"{error.filename}: {error.strerror}") from error
        _log.warning(f"[snapshot] {error.filename}: {error.strerror}; sending the original")
        return None
    return {path: copies[source] for path, source in own.items()}


def _unreadable(error: OSError) -> SnapshotError:
    """Return the error for a file that cannot be read."""
    return SnapshotError(
        f"{error.filename}: {error.strerror}; a snapshot without it would be incomplete: make it "
        "readable, or move it out of the folder"
    )


def _has_room(folder: Path, need: int) -> bool:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize >= 2 * need + _LEFT_BYTES


def _copy(source: Path, target: Path, ends: float) -> None:
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:  # another file system, or one that cannot clone
            for at, data in data_of(source, reader):
                writer.seek(at)
                writer.write(data)
                if time.monotonic() > ends:
                    raise SnapshotError(
                        f"copying {source.name!r} would keep the program stopped for more than "
                        f"{_STANDSTILL_SECONDS:g} s; a file system that clones files, such as "
                        "XFS, takes milliseconds"
                    ) from None
            writer.truncate()


class CapturedFile(Contents):
    """A captured file, hashed first because the store may already have its contents."""

    is_named_by_content = True

    def __init__(self, path: str, source: Path, size: int) -> None:
        self.path = path
        self.name = ""  # the blob that it becomes
        self.extents = Extents.of(source, size)
        self._size = size if self.extents is None else self.extents.data_bytes
        self.part_bytes = part_bytes_of(self._size)
        self._source = source
        self._digests = [b""] * num_parts(self._size, self.part_bytes)

    @property
    def size(self) -> int:
        return self._size

    @property
    def sha256(self) -> str:
        """The checksum, once all parts are hashed."""
        return checksum_of(self._digests)

    def hashing(self) -> Iterator[Callable[[], None]]:
        """Return a task for each part."""
        return (partial(self._hash, part) for part in range(len(self._digests)))

    def _hash(self, part: int) -> None:
        start = part * self.part_bytes
        data = self.read(start, min(start + self.part_bytes, self.size))
        self._digests[part] = hashlib.sha256(data).digest()

    def read(self, start: int, stop: int, spare: Spare | None = None) -> memoryview:
        """Return some of its bytes, not counting holes; ChangedError if it has become shorter."""
        if self.extents is None:
            return self._read(start, stop)
        found = self.extents.places(start, stop)
        return memoryview(b"".join(self._read(at, at + last - first) for at, first, last in found))

    def _read(self, start: int, stop: int) -> memoryview:
        try:
            with self._source.open("rb", buffering=0) as stream:
                stream.seek(start)
                data = stream.read(stop - start)
                while len(data) < stop - start and (more := stream.read(stop - start - len(data))):
                    data += more
        except FileNotFoundError as error:
            raise ChangedError(f"{self.path!r} was deleted while it was sent") from error
        except OSError as error:
            raise _unreadable(error) from error
        if len(data) < stop - start:
            raise ChangedError(f"{self.path!r} became shorter while it was sent")
        return memoryview(data)

    def digest(self, part: int, data: memoryview, *, is_fast: bool) -> bytes:
        return self._digests[part]

    def content(self, blob: str | None, start: int = 0) -> Content:
        """Return its contents as they are stored in a blob."""
        return Content(
            bytes=self.size,
            sha256=self.sha256,
            part_bytes=self.part_bytes,
            blob=blob,
            start=start,
            extents=self.extents,
        )


class Pack(Contents):
    """Small files that are stored as one blob of one part."""

    def __init__(self, files: Sequence[CapturedFile]) -> None:
        self._files = files

    @property
    def size(self) -> int:
        return sum(file.size for file in self._files)

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        return memoryview(b"".join(file.read(0, file.size) for file in self._files))


def packed(files: Sequence[CapturedFile]) -> Iterator[list[CapturedFile]]:
    """Yield groups of consecutive files, each up to one part in size."""
    pack: list[CapturedFile] = []
    size = 0
    for one in files:
        if pack and size + one.size > PART_BYTES:
            yield pack
            pack, size = [], 0
        pack.append(one)
        size += one.size
    if pack:
        yield pack
