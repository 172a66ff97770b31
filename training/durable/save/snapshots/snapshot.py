"""A snapshot: what snapshot.json records of a folder (restore.py makes a folder so again).

Of files with holes, such as databases and memory maps make, only the data is sent and written.
Anyone who can write to the store could put any path into it, so a path that leaves the folder, or
passes through a link, is refused before anything is written.
"""

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeAlias, get_args

from contract.keys import BLOB_NAME, checkpoint_prefix
from training.durable.attempt.resume_point import DamagedCheckpointError
from training.durable.record.head import CheckpointEntry
from training.durable.store.protocol import Store
from training.durable.store.transfer import (
    MAX_PARTS,
    num_parts,
)

_log = logging.getLogger(__name__)

SNAPSHOT = "snapshot.json"
_FORMAT = 1
# Larger files are objects of their own.
SMALL_BYTES = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 512  # of st_blocks
# With more, the list would cost more than the holes.
_MOST_EXTENTS = 1000
_READ_BYTES = 4 * 1024 * 1024

# Why a snapshot was taken: the program asked, the folder was quiet, a notice came, logs grew (in a
# manifest also `quiet`, as older readers know), the program ended, or it was stopped for the
# snapshot, which then holds what a crash would have left.
Reason: TypeAlias = Literal["commit", "quiet", "notice", "appended", "exit", "crash-consistent"]


class Extents(tuple[tuple[int, int], ...]):
    """(start, bytes) of each span of data, in order, and last (size, 0): where the file ends."""

    __slots__ = ()

    @classmethod
    def of(cls, path: Path, size: int) -> Self | None:
        """Find where the first `size` bytes of a file hold data; None if all of them do."""
        try:
            if path.stat().st_blocks * _BLOCK_BYTES >= size:
                return None
            with path.open("rb") as stream:
                found = tuple(_extents(stream.fileno(), size))
        except OSError:
            return None  # whoever reads it reports why it cannot be read
        is_dense = sum(count for _, count in found) == size
        return None if is_dense or len(found) > _MOST_EXTENTS else cls((*found, (size, 0)))

    @property
    def data_bytes(self) -> int:
        """Bytes of the data."""
        return sum(count for _, count in self)

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (position in the file, first, last) of the data's spans from `start` to `stop`."""
        first = 0
        for at, count in self:
            begin, end = max(start, first), min(stop, first + count)
            if begin < end:
                yield at + begin - first, begin, end
            first += count

    def refuse_wrong(self, size: int) -> None:
        """Raise ValueError unless they describe `size` bytes of data."""
        end = 0
        for start, count in self:
            if start < end or count < 0:
                raise ValueError("the extents overlap")
            end = start + count
        if not self or self[-1][1] or self.data_bytes != size:
            raise ValueError("the extents do not match the data")


def _extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    end = 0
    while end < size:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # no data after it
            return
        end = os.lseek(file, start, os.SEEK_HOLE)
        if start < size:
            yield start, min(end, size) - start


def data_of(path: Path, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the data of an open file with their positions, to its end if it has no holes."""
    size = os.fstat(stream.fileno()).st_size
    for start, count in Extents.of(path, size) or ((0, sys.maxsize),):
        at = stream.seek(start)
        while data := stream.read(min(_READ_BYTES, start + count - at)):
            yield at, data
            at += len(data)
        if not count:
            yield at, b""  # a hole before its end


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The bytes of one or more files, and where they are; `blob` is None for empty files."""

    bytes: int
    sha256: str  # of its bytes; for several parts, of their concatenated digests
    part_bytes: int
    blob: str | None
    start: int = 0
    extents: Extents | None = None  # where the bytes are in a file with holes

    def __post_init__(self) -> None:
        _refuse_other_than_numbers(self.bytes, self.part_bytes, self.start)
        if self.bytes < 0 or self.start < 0 or self.part_bytes < 1:
            raise ValueError("a size is wrong")
        if num_parts(self.bytes, self.part_bytes) > MAX_PARTS:
            raise ValueError(f"there are more than {MAX_PARTS} parts")
        if not _SHA256.fullmatch(self.sha256) or (self.blob is None and self.bytes):
            raise ValueError("a checksum or blob is missing")
        if self.extents is not None:
            _refuse_other_than_numbers(*(number for pair in self.extents for number in pair))
            self.extents.refuse_wrong(self.bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.bytes if self.extents is None else self.extents[-1][0]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Content":
        """Read what `asdict` returned."""
        extents = record.get("extents")
        pairs = None if extents is None else Extents((start, count) for start, count in extents)
        return cls(**{**record, "extents": pairs})


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFolder:
    """One folder of a snapshot."""

    path: str
    mode: int
    mtime_ns: int

    def __post_init__(self) -> None:
        _refuse_other_than_numbers(self.mode, self.mtime_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile(SavedFolder):
    """One file of a snapshot."""

    content: Content


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedLink:
    """One symbolic link; its target need not be part of the snapshot."""

    path: str
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderManifest:
    """A folder at one moment: what a snapshot.json holds."""

    reason: Reason
    # Whether the program says when to capture, in which case no other moment counts.
    program_says_when: bool
    files: tuple[SavedFile, ...]
    links: tuple[SavedLink, ...] = ()
    folders: tuple[SavedFolder, ...] = ()
    blobs: Mapping[str, int] = field(default_factory=dict)  # name -> bytes, all that it needs
    note: Mapping[str, Any] = field(default_factory=dict)
    hard_links: tuple[tuple[str, ...], ...] = ()  # paths of one file, for each that has several

    def __post_init__(self) -> None:
        self._refuse_foreign_paths()
        self._refuse_foreign_hard_links()
        for file in self.files:
            content = file.content
            if content.blob is None:
                continue
            if content.start + content.bytes > self.blobs[content.blob]:
                raise ValueError(f"{file.path!r} does not fit into its blob")
        for blob, size in self.blobs.items():
            if not BLOB_NAME.fullmatch(blob) or size < 1:
                raise ValueError(f"the blob {blob!r} was not written by a mirror")
        if self.reason not in get_args(Reason):
            raise ValueError(f"the reason {self.reason!r} is unknown")

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.content.bytes for file in self.files)

    @property
    def contents(self) -> dict[str, Content]:
        """The contents by their checksums."""
        return {file.content.sha256: file.content for file in self.files}

    def holds_no_more_than(self, before: "FolderManifest | None") -> bool:
        """Whether `before`, which was published earlier, already holds the same."""
        if before is None or (self.program_says_when and not before.program_says_when):
            return False
        better = {"crash-consistent": ("quiet", "notice"), "notice": ("quiet",)}
        if self.reason in better.get(before.reason, ()):
            return False  # the same content is now known to be complete
        mine, others = (
            (one.files, one.links, one.folders, one.hard_links) for one in (self, before)
        )
        return mine == others

    def to_bytes(self) -> bytes:
        """Return the JSON to store; names that are not text keep their bytes as surrogates."""
        record = {"format": _FORMAT, **asdict(self)}
        if not self.hard_links:  # then whoever knows none can read it, too
            del record["hard_links"]
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "FolderManifest":
        """Read what `to_bytes` wrote; DamagedCheckpointError for anything else."""
        try:
            record = json.loads(data)
            if record.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            files = [
                SavedFile(**{**file, "content": Content.from_json(file["content"])})
                for file in record.pop("files")
            ]
            links = [SavedLink(**link) for link in record.pop("links")]
            folders = [SavedFolder(**folder) for folder in record.pop("folders")]
            hard_links = tuple(map(tuple, record.pop("hard_links", ())))
            return cls(
                **record,
                files=tuple(files),
                links=tuple(links),
                folders=tuple(folders),
                hard_links=hard_links,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DamagedCheckpointError(f"{SNAPSHOT} was not written by a mirror: {why}") from None

    def _refuse_foreign_paths(self) -> None:
        folders = {folder.path for folder in self.folders}
        seen: set[str] = set()
        for path in self.paths:
            parts = path.split("/")
            if "\0" in path or {"", ".", ".."} & set(parts):
                raise ValueError(f"the path {path!r} leaves the folder")
            if len(parts) > 1 and path.rpartition("/")[0] not in folders:
                raise ValueError(f"the path {path!r} is not in a folder of the snapshot")
            if path in seen:
                raise ValueError(f"the path {path!r} occurs twice")
            seen.add(path)
        targets = [link.target for link in self.links]
        if any(not isinstance(one, str) or not one or "\0" in one for one in targets):
            raise ValueError("a link points to nothing")

    def _refuse_foreign_hard_links(self) -> None:
        contents = {file.path: file.content for file in self.files}
        linked = [path for group in self.hard_links for path in group]
        if len(set(linked)) < len(linked) or not contents.keys() >= set(linked):
            raise ValueError("a hard link occurs twice, or is no file")
        for group in self.hard_links:
            if len({contents[path] for path in group}) != 1:
                raise ValueError(f"the hard links {group} differ")

    @property
    def paths(self) -> Iterator[str]:
        """The paths of files, links and folders."""
        for found in (self.files, self.links, self.folders):
            yield from (one.path for one in found)


def _refuse_other_than_numbers(*values: int) -> None:
    """Raise ValueError for anything but a 64-bit integer, the type that file systems use."""
    for value in values:
        if type(value) is not int or abs(value) >= 1 << 63:
            raise ValueError(f"{value!r} is not a 64-bit integer")


def read_manifest(store: Store, entry: CheckpointEntry) -> FolderManifest:
    """Read and verify a snapshot.json; may raise DamagedCheckpointError."""
    found = next((file for file in entry.files if file.name == SNAPSHOT), None)
    if found is None:
        raise DamagedCheckpointError(f"the head names no {SNAPSHOT}")
    stored = store.get(checkpoint_prefix(entry.name) + SNAPSHOT)
    if stored is None:
        raise DamagedCheckpointError(f"{SNAPSHOT} is missing")
    if hashlib.sha256(stored.data).hexdigest() != found.sha256:
        raise DamagedCheckpointError(f"{SNAPSHOT} does not match its SHA-256")
    return FolderManifest.from_bytes(stored.data)
