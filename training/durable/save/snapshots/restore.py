"""Makes a folder what a snapshot was; a program that sorts its files by time finds them so.

A folder is filled in place, files that are equal are kept, every byte is verified, and the program
starts once that is done: if an attempt is killed in between, the next one restores again.
"""

import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from contract.errors import UserError
from contract.file_names import composed
from contract.keys import blob_key, second_key
from training.durable.attempt.resume_point import DamagedCheckpointError
from training.durable.errors import MachineError
from training.durable.record.head import CheckpointEntry
from training.durable.save.snapshots.listing import (
    KEPT,
    FileState,
    Listing,
    Mirrored,
    Root,
    SnapshotError,
    list_folder,
    places_of,
)
from training.durable.save.snapshots.snapshot import (
    SMALL_BYTES,
    Content,
    FolderManifest,
    SavedFile,
    SavedFolder,
    read_manifest,
)
from training.durable.store.protocol import Store, StoreError
from training.durable.store.transfer import (
    PART_BYTES,
    FileEntry,
    checksum_of,
    num_parts,
    receive,
    run_all,
    write_at,
)

_log = logging.getLogger(__name__)

_MAX_THREADS = 8
# How long a restore may wait for the clock that stamps files, and one step of it at most.
_DATING_SECONDS = 10.0
_TICK_SECONDS = 0.01
# A file that names its folder is small: `checkpoint`, `last_checkpoint`, a YAML of settings.
_NAMING_BYTES = 64 * 1024
# Not the disk's fault: another user's files, or names that its file system cannot hold.
_OF_THE_FOLDER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.EILSEQ)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A folder that holds a snapshot."""

    manifest: FolderManifest
    files: Mapping[FileState, Content]
    reused_bytes: int
    damaged: frozenset[str] = frozenset()  # blobs whose second copy was read
    remarks: tuple[str, ...] = ()  # what is not as it was, and what to do


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


def fill(store: Store, manifest: FolderManifest, root: Root) -> Filled:
    """Make the folder what the snapshot was; may raise DamagedCheckpointError or StoreError.

    What is kept stays as the source has it if the snapshot is older than that.
    """
    if isinstance(root, Mirrored) and KEPT not in {one.path for one in manifest.folders}:
        root = root.folder
    need, folder = 0, Path(root)
    try:
        if folder.is_symlink() and not folder.exists():
            folder.unlink()  # to a folder that went with another disk
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_names_that_collide(manifest, root)
        kept = _clear(manifest, root)
        linked = _to_link(manifest, kept)
        missing = [file for file in manifest.files if file.path not in kept | linked.keys()]
        need = sum(file.content.bytes for file in missing)
        _refuse_without_room(root, need)
        for one in manifest.folders:
            (root / one.path).mkdir(exist_ok=True)
        fetching = _Fetching(store, root, missing)
        fetching.run()
        for path, to in linked.items():
            _link(root / to, root / path)
        remarks = [*_point(manifest, root), *_date(manifest, root, kept)]
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
        remarks=tuple(remarks),
    )


def _clear(manifest: FolderManifest, root: Root) -> set[str]:
    """Delete what the snapshot does not hold; return the paths of files that already match it."""
    listing = list_folder(root)
    wanted = {file.path: file.content for file in manifest.files}
    equal: set[str] = set()

    def compare(path: str) -> None:
        if _checksum(root / path, wanted[path]) == wanted[path].sha256:
            equal.add(path)

    candidates = [
        partial(compare, path)
        for path, state in listing.files.items()
        if path in wanted and wanted[path].bytes == wanted[path].file_bytes == state.bytes
    ]
    run_all(candidates, _MAX_THREADS)
    kept = _linked_as_saved(manifest, listing, equal)
    links = {link.path: link.target for link in manifest.links}
    same = {path for path, target in listing.links.items() if links.get(path) == target}
    for folder, state in listing.folders.items():
        if state.mode & 0o700 != 0o700:
            (root / folder).chmod(0o700)
    stays = kept | same
    for path in (*listing.files, *listing.links, *listing.skipped):
        if path not in stays:
            (root / path).unlink()
    folders = {folder.path for folder in manifest.folders}
    for path in sorted(listing.folders.keys() - folders, reverse=True):
        (root / path).rmdir()
    return kept


def _linked_as_saved(manifest: FolderManifest, listing: Listing, equal: Iterable[str]) -> set[str]:
    """Return those of the equal files that are the same file, or not, as in the snapshot."""
    group_of = {path: group[0] for group in manifest.hard_links for path in group}
    owners: dict[tuple[int, int], str] = {}
    inodes: dict[str, tuple[int, int]] = {}
    kept = set()
    for path in sorted(equal):
        inode, group = listing.files[path].file, group_of.get(path, path)
        if owners.setdefault(inode, group) == group and inodes.setdefault(group, inode) == inode:
            kept.add(path)
    return kept


def _to_link(manifest: FolderManifest, kept: set[str]) -> dict[str, str]:
    """Return the paths to be made hard links, each with the one that is there or is fetched."""
    found: dict[str, str] = {}
    for group in manifest.hard_links:
        first = next((path for path in group if path in kept), group[0])
        found |= {path: first for path in group if path != first and path not in kept}
    return found


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        shutil.copyfile(source, target)


def _point(manifest: FolderManifest, root: Root) -> Iterator[str]:
    """Make the links, last, so that nothing is written through one; yield what named another root.

    A link into the folder of the machine before becomes one into this folder.
    """
    targets = {link.path: link.target for link in manifest.links}
    small = [file for file in manifest.files if 0 < file.content.file_bytes <= _NAMING_BYTES]
    for place, here in places_of(root).items():
        before = str(manifest.note.get(place, here))
        if before == here:
            continue
        moved = [path for path, to in targets.items() if f"{to}/".startswith(f"{before}/")]
        targets |= {path: here + targets[path].removeprefix(before) for path in moved}
        if moved:
            yield f"links into {before} now point into {here}: {_listed(moved)}"
        name = os.fsencode(before)
        named = [file.path for file in small if name in (root / file.path).read_bytes()]
        if named:
            yield (
                f"{_listed(named)} names {before}, where this folder was on the machine before; "
                f"here it is {here}: if the program reads that path, let it save relative ones"
            )
    for path, target in targets.items():
        link = root / path
        if not link.is_symlink() or str(link.readlink()) != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def _date(manifest: FolderManifest, root: Root, kept: set[str]) -> Iterator[str]:
    """Set modes and times, oldest first: the times of change, which nobody can set, follow them.

    What is equal and older than all that is not stays untouched. Yield how many times of change
    are alike because more would have taken too long; those of the newest files differ.
    """
    saved: list[SavedFolder] = [*manifest.files, *manifest.folders]
    saved.sort(key=attrgetter("mtime_ns"))
    made = {file.path for file in manifest.files} - kept
    first = next((n for n, one in enumerate(saved) if one.path in made or _differs(root, one)), -1)
    if first < 0:
        return
    late = saved[first:]
    times = len({one.mtime_ns for one in late})
    left, before, changed, alike = _DATING_SECONDS, None, 0, 0
    for one in late:
        path = root / one.path
        path.chmod(one.mode & 0o777)
        os.utime(path, ns=(one.mtime_ns, one.mtime_ns))
        if one.mtime_ns != before:
            began = time.monotonic()
            is_later = _change_after(changed, path, one.mtime_ns, left >= times * _TICK_SECONDS)
            left -= time.monotonic() - began
            alike, times, before = alike + (not is_later), times - 1, one.mtime_ns
        changed = path.lstat().st_ctime_ns
    if alike:
        yield f"{alike} of the oldest files have the same time of change (ctime) as others"


def _differs(root: Root, saved: SavedFolder) -> bool:
    found = FileState.of((root / saved.path).lstat())
    return (found.mode & 0o777, found.mtime_ns) != (saved.mode & 0o777, saved.mtime_ns)


def _change_after(changed: int, path: Path, mtime_ns: int, may_wait: bool) -> bool:
    """Give a file a time of change after this one; return whether it has one."""
    ends = time.monotonic() + 2 * _TICK_SECONDS
    while not (is_later := path.lstat().st_ctime_ns > changed):
        if not may_wait or time.monotonic() > ends:
            break
        time.sleep(_TICK_SECONDS / 10)
        os.utime(path, ns=(mtime_ns, mtime_ns))
    return is_later


class _Fetching:
    """Files on their way from the store into a folder."""

    def __init__(self, store: Store, root: Root, files: Sequence[SavedFile]) -> None:
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


def _checksum(path: Path, content: Content) -> str:
    size = min(content.bytes, content.part_bytes)
    parts = range(num_parts(content.bytes, content.part_bytes))
    with path.open("rb") as stream:
        return checksum_of([hashlib.sha256(stream.read(size)).digest() for _ in parts])


def _refuse_without_room(root: Root, need: int, *, is_full: bool = False) -> None:
    about = os.statvfs(root)
    free = about.f_bavail * about.f_frsize
    if is_full or free < need:
        # On a disk of this size it may fit, once other files are gone.
        may_fit = need < about.f_blocks * about.f_frsize
        raise (MachineError if may_fit else UserError)(
            f"the snapshot does not fit on the disk of {root}: it needs {need / 1e6:,.1f} MB more "
            f"and {free / 1e6:,.1f} MB are free; use a larger volume, or free some space"
        )


def _refuse_names_that_collide(manifest: FolderManifest, root: Root) -> None:
    names: dict[str, str] = {}
    for path in manifest.paths:
        folded = composed(path).casefold()
        if folded in names and not _is_case_sensitive(root):
            raise UserError(
                f"the file system of {root} cannot tell {names[folded]!r} from {path!r}; "
                "use a folder on one that can"
            )
        names[folded] = path


def _is_case_sensitive(root: Root) -> bool:
    with tempfile.TemporaryDirectory(prefix="case-", dir=Path(root)) as probe:
        return not Path(probe).with_name(Path(probe).name.upper()).exists()
