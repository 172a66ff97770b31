"""Restores a folder from a snapshot; files that are there already are kept if they are equal.

The folder is filled in place, and the program starts once that is done: if an attempt is killed in
between, the next one restores again. Every byte is verified; nothing is written outside the folder.
"""

import errno
import hashlib
import logging
import os
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from contract.errors import UserError
from contract.keys import blob_key, checkpoint_prefix, second_key
from training.durable.attempt.resume_point import DamagedCheckpointError
from training.durable.errors import MachineError
from training.durable.record.head import CheckpointEntry
from training.durable.save.listing import FileState, SnapshotError, list_folder
from training.durable.save.manifest import SMALL_BYTES, SNAPSHOT, Content, FolderManifest, SavedFile
from training.durable.store.protocol import Store, StoreError
from training.durable.store.transfer import (
    PART_BYTES,
    FileEntry,
    checksum_of,
    receive,
    run_all,
    write_at,
)

_log = logging.getLogger(__name__)

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
        # If there is no second copy, or it cannot be read, the first error says more.
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
        if folded in names and not _tells_case_apart(root):
            raise UserError(
                f"the file system of {root} cannot tell {names[folded]!r} from {path!r}; "
                "use a folder on one that can"
            )
        names[folded] = path


def _tells_case_apart(root: Path) -> bool:
    with tempfile.TemporaryDirectory(prefix="case-", dir=root) as probe:
        return not Path(probe).with_name(Path(probe).name.upper()).exists()
