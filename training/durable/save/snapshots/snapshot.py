"""A snapshot: what snapshot.json records of a folder, and a folder made so again.

Of files with holes, such as databases and memory maps make, only the data is sent and written.
Anyone who can write to the store could put any path into it, so a path that leaves the folder, or
passes through a link, is refused before anything is written.

A folder is filled in place, files that are equal are kept, every byte is verified, and the program
starts once that is done: if an attempt is killed in between, the next one restores again.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeAlias, get_args

from contract.errors import UserError
from contract.keys import BLOB_NAME, blob_key, checkpoint_prefix, second_key
from training.durable.attempt.resume_point import DamagedCheckpointError
from training.durable.errors import MachineError
from training.durable.record.head import CheckpointEntry
from training.durable.save.snapshots.listing import FileState, SnapshotError, list_folder
from training.durable.store.protocol import Store, StoreError
from training.durable.store.transfer import (
    MAX_PARTS,
    PART_BYTES,
    FileEntry,
    checksum_of,
    num_parts,
    receive,
    run_all,
    write_at,
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

    def __post_init__(self) -> None:
        self._refuse_foreign_paths()
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
        if before.reason == "crash-consistent" and self.reason in ("quiet", "notice"):
            return False  # the same content is now known to be complete
        mine, others = ((one.files, one.links, one.folders) for one in (self, before))
        return mine == others

    def to_bytes(self) -> bytes:
        """Return the JSON to store; names that are not text keep their bytes as surrogates."""
        record = {"format": _FORMAT, **asdict(self)}
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
            return cls(**record, files=tuple(files), links=tuple(links), folders=tuple(folders))
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


_MAX_THREADS = 8
# Not the disk's fault: another user's files, or names that its file system cannot hold.
_OF_THE_FOLDER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.EILSEQ)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A folder that holds a snapshot."""

    manifest: FolderManifest
    files: Mapping[FileState, Content]
    reused_bytes: int
    damaged: frozenset[str] = frozenset()  # blobs whose second copy was read


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


def export_snapshot(store: Store, entry: CheckpointEntry, out: Path) -> FolderManifest:
    """Write a snapshot's files into `out`, a new or empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; use a new folder")
    try:
        manifest = read_manifest(store, entry)
        fill(store, manifest, out)
    except DamagedCheckpointError as error:
        raise UserError(f"snapshot {entry.name} is damaged: {error}; use another one") from error
    return manifest


def fill(store: Store, manifest: FolderManifest, root: Path) -> Filled:
    """Make the folder what the snapshot was; may raise DamagedCheckpointError or StoreError."""
    need = 0
    try:
        root.mkdir(parents=True, exist_ok=True)
        _refuse_names_that_collide(manifest, root)
        kept = _clear(manifest, root)
        missing = [file for file in manifest.files if file.path not in kept]
        need = sum(file.content.bytes for file in missing)
        _refuse_without_room(root, need)
        for folder in manifest.folders:
            (root / folder.path).mkdir(exist_ok=True)
        fetching = _Fetching(store, root, missing)
        fetching.run()
        _finish(manifest, root)
    except SnapshotError as error:
        raise UserError(f"the snapshot cannot be restored into {root}: {error}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _refuse_without_room(root, need, is_full=True)
        if error.errno in _OF_THE_FOLDER:
            raise UserError(
                f"the snapshot cannot be restored into {root}: {error}; use another folder"
            ) from error
        raise
    contents = {file.path: file.content for file in manifest.files}
    listing = list_folder(root)
    return Filled(
        manifest=manifest,
        files={
            state: contents[path]
            for path, state in listing.files.items()
            if not listing.is_log(path)
        },
        reused_bytes=sum(contents[path].bytes for path in kept),
        damaged=frozenset(fetching.damaged),
    )


def _clear(manifest: FolderManifest, root: Path) -> set[str]:
    """Delete what the snapshot does not hold; return the paths of files that already match it."""
    listing = list_folder(root)
    wanted = {file.path: file.content for file in manifest.files}
    equal: set[str] = set()

    def compare(path: str) -> None:
        if _checksum(root / path, wanted[path].part_bytes) == wanted[path].sha256:
            equal.add(path)

    candidates = [
        partial(compare, path)
        for path, state in listing.files.items()
        if path in wanted and wanted[path].bytes == wanted[path].file_bytes == state.bytes
    ]
    run_all(candidates, _MAX_THREADS)
    for folder in listing.folders:
        (root / folder).chmod(0o700)
    for path in (*listing.files, *listing.links, *listing.skipped):
        if path not in equal:
            (root / path).unlink()
    folders = {folder.path for folder in manifest.folders}
    for path in sorted(listing.folders.keys() - folders, reverse=True):
        (root / path).rmdir()
    return equal


class _Fetching:
    """Files on their way from the store into a folder."""

    def __init__(self, store: Store, root: Path, files: Sequence[SavedFile]) -> None:
        self._store = store
        self._root = root
        self.damaged: set[str] = set()
        self._paths: dict[Content, list[str]] = {}
        for file in files:
            self._paths.setdefault(file.content, []).append(file.path)

    def run(self) -> None:
        """Write the files, each verified; DamagedCheckpointError if one does not match."""
        small = [content for content in self._paths if content.bytes <= SMALL_BYTES]
        large = [content for content in self._paths if content.bytes > SMALL_BYTES]
        num_threads = min(_MAX_THREADS, self._store.num_threads)
        tasks = [partial(self._write_small, span) for span in _spans(small)]
        # Files of one part in parallel; those of several in turn, each with its parts in parallel.
        tasks += [
            partial(self._write_large, content, 1)
            for content in large
            if content.bytes <= content.part_bytes
        ]
        run_all(tasks, num_threads)
        for content in large:
            if content.bytes > content.part_bytes:
                self._write_large(content, num_threads)

    def _write_small(self, span: Sequence[Content]) -> None:
        first, last = span[0], span[-1]
        data = memoryview(bytearray(last.start + last.bytes - first.start))
        own = {c: data[c.start - first.start : c.start - first.start + c.bytes] for c in span}

        def read(key: str) -> Content | None:
            if first.blob is not None:
                self._store.read_into(key, first.start, data)
            wrong = (c for c in span if hashlib.sha256(own[c]).hexdigest() != c.sha256)
            return next(wrong, None)

        self._from_either(first.blob, read)
        for content in span:
            for path in self._paths[content]:
                file = _create(self._root / path)
                _write(file, content, 0, own[content])
                os.close(file)

    def _write_large(self, content: Content, num_threads: int) -> None:
        assert content.blob is not None
        path, *others = self._paths[content]
        about = FileEntry(
            name=content.blob,
            bytes=content.bytes,
            sha256=content.sha256,
            part_bytes=content.part_bytes,
        )
        file = _create(self._root / path)

        def read(key: str) -> Content | None:
            is_whole = receive(
                self._store,
                key,
                about,
                partial(_write, file, content),
                start=content.start,
                num_threads=num_threads,
            )
            return None if is_whole else content

        try:
            self._from_either(content.blob, read)
        finally:
            os.close(file)
        for other in others:
            shutil.copyfile(self._root / path, self._root / other)

    def _from_either(self, blob: str | None, read: Callable[[str], Content | None]) -> None:
        """Read a blob, or its second copy if it is damaged: `read` returns what does not match."""
        error: DamagedCheckpointError | StoreError
        try:
            wrong = read(blob_key(blob or ""))
            if wrong is None:
                return
            path = self._paths[wrong][0]
            error = DamagedCheckpointError(f"{path!r} does not match its SHA-256")
        except FileNotFoundError:
            error = DamagedCheckpointError(f"the blob {blob} is missing")
        except StoreError as refused:
            error = refused
        assert blob is not None
        # If there is no second copy, or it cannot be read, the first error explains more.
        with suppress(FileNotFoundError, StoreError):
            if read(second_key(blob)) is None:
                _log.warning(f"[restore] {error}; its second copy was read")
                self.damaged.add(blob)
                return
        raise error


def _spans(contents: Iterable[Content]) -> Iterator[list[Content]]:
    """Group contents of one blob that are close together, to be read at once."""
    span: list[Content] = []
    for content in sorted(contents, key=lambda one: (one.blob or "", one.start)):
        fits = span and span[0].blob == content.blob
        if fits and content.start + content.bytes - span[0].start <= PART_BYTES:
            span.append(content)
            continue
        if span:
            yield span
        span = [content]
    if span:
        yield span


def _write(file: int, content: Content, start: int, data: memoryview) -> None:
    """Write some of a content's bytes at their places in the file, and set its length."""
    if content.extents is None:
        write_at(file, data, start)
        return
    for at, first, last in content.extents.places(start, start + len(data)):
        write_at(file, data[first - start : last - start], at)
    os.truncate(file, content.file_bytes)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def _finish(manifest: FolderManifest, root: Path) -> None:
    """Make the links last, so that nothing is written through one; then set modes and times."""
    for link in manifest.links:
        (root / link.path).symlink_to(link.target)
    for file in manifest.files:
        (root / file.path).chmod(file.mode & 0o777)
        os.utime(root / file.path, ns=(file.mtime_ns, file.mtime_ns))
    for folder in sorted(manifest.folders, key=lambda one: one.path, reverse=True):
        os.utime(root / folder.path, ns=(folder.mtime_ns, folder.mtime_ns))
        (root / folder.path).chmod(folder.mode & 0o777)


def _checksum(path: Path, part_bytes: int) -> str:
    digests: list[bytes] = []
    with path.open("rb", buffering=0) as stream:
        while True:
            digest, left = hashlib.sha256(), part_bytes
            while left and (data := stream.read(min(left, PART_BYTES))):
                digest.update(data)
                left -= len(data)
            if left == part_bytes and digests:
                return checksum_of(digests)
            digests.append(digest.digest())
            if left:
                return checksum_of(digests)


def _refuse_without_room(root: Path, need: int, *, is_full: bool = False) -> None:
    about = os.statvfs(root)
    free = about.f_bavail * about.f_frsize
    if is_full or free < need:
        # On a disk of this size it may fit, once other files are gone.
        may_fit = need < about.f_blocks * about.f_frsize
        raise (MachineError if may_fit else UserError)(
            f"the snapshot does not fit on the disk of {root}: it needs {need / 1e6:,.1f} MB more "
            f"and {free / 1e6:,.1f} MB are free; use a larger volume, or free some space"
        )


def _refuse_names_that_collide(manifest: FolderManifest, root: Path) -> None:
    names: dict[str, str] = {}
    for path in manifest.paths:
        folded = unicodedata.normalize("NFC", path).casefold()
        if folded in names and not _is_case_sensitive(root):
            raise UserError(
                f"the file system of {root} cannot tell {names[folded]!r} from {path!r}; "
                "use a folder on one that can"
            )
        names[folded] = path


def _is_case_sensitive(root: Path) -> bool:
    with tempfile.TemporaryDirectory(prefix="case-", dir=root) as probe:
        return not Path(probe).with_name(Path(probe).name.upper()).exists()
