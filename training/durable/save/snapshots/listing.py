"""The content of a folder at one moment: files with their identities, links, folders.

Reads no file. A file counts as unchanged while its inode, size and times stay the same. Times have
the granularity of the kernel's clock, so those of a file that has just changed do not show another
change yet: `settled` waits until they do.
"""

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import TypeAlias

# The kernel's clock ticks every 1 to 10 ms; a second change within a tick leaves the same times.
_TICK_NS = 20_000_000
# Some file systems (FAT, old ext4) round times to one or two seconds.
_SECOND_NS = 1_000_000_000
# What was written so long before the newest file may be of the same save.
_SAVE_NS = 60 * _SECOND_NS
# Logs stay open and only grow; their readers expect that the end may be missing.
_LOGS = ("events.out.tfevents.*", "*.log")
# What mkfs puts into the root of a volume.
_NOT_OURS = "lost+found"
# In paths: the program's working folder.
KEPT = "@working_folder"
FOLDER = "folder"  # in a note: where the checkpoint folder was


class SnapshotError(RuntimeError):
    """The folder as it is allows no snapshot: one sentence with the reason."""


class ChangedError(SnapshotError):
    """The folder changed while it was captured; try again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirrored:
    """A checkpoint folder, and what is kept of the working folder, whose paths begin with KEPT."""

    folder: Path
    working: Path
    keep: tuple[str, ...]

    def __truediv__(self, path: str) -> Path:
        first, _, rest = path.partition("/")
        return self.working / rest if first == KEPT else self.folder / path

    def __fspath__(self) -> str:
        return str(self.folder)

    __str__ = __fspath__

    @property
    def kept(self) -> list[PurePosixPath]:
        """What is kept, as paths of a snapshot; the names may be of files, and not be there yet."""
        return [PurePosixPath(KEPT, name) for name in self.keep]


Root: TypeAlias = Path | Mirrored


@dataclass(frozen=True, kw_only=True, slots=True)
class FileState:
    """The state of a regular file or folder; files with equal states have the same content."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int
    mode: int

    @classmethod
    def of(cls, found: os.stat_result) -> "FileState":
        """Build it from a result of stat."""
        return cls(
            device=found.st_dev,
            inode=found.st_ino,
            bytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            mode=stat.S_IMODE(found.st_mode),
        )

    @property
    def file(self) -> tuple[int, int]:
        """Device and inode: two names of one file have the same."""
        return self.device, self.inode

    def may_grow_to(self, later: "FileState") -> bool:
        """Whether the same file may only have grown."""
        return self.inode == later.inode and self.bytes < later.bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The content of a folder; paths are relative, with slashes, sorted."""

    files: dict[str, FileState]
    links: dict[str, str]  # path -> what it points to
    folders: dict[str, FileState]
    skipped: dict[str, str]  # path -> what it is instead of a file
    began_ns: int  # by the clock that stamps files
    logs: frozenset[str] | None = None  # those known by how they are written; None: by name

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a link nor a file, TensorBoard's curves aside."""
        own = [path for path in self.files if not path.startswith(f"{KEPT}/")]
        is_bare = len(own) == len(self.files) and not self.links
        return is_bare and all(is_named_log(path, _LOGS[:1]) for path in own)

    def difference(self, other: "Listing") -> str | None:
        """Return one path that differs in the other, later one; what it knows as logs may grow."""
        if self.links != other.links:
            return _differing(self.links, other.links)
        modes = [{path: f.mode for path, f in one.folders.items()} for one in (self, other)]
        if modes[0] != modes[1]:
            return _differing(*modes)
        mine, others = self.files, other.files
        if mine.keys() != others.keys():
            return _differing(mine, others)
        changed = (p for p in mine if mine[p] != others[p])
        return next(
            (p for p in changed if not (other.is_log(p) and mine[p].may_grow_to(others[p]))), None
        )

    def grown(self, other: "Listing") -> list[str]:
        """Return the logs that are longer in the other, later one, if nothing else has changed."""
        if self.difference(other) is not None:
            return []
        return [path for path, file in self.files.items() if file != other.files[path]]

    @property
    def hard_links(self) -> tuple[tuple[str, ...], ...]:
        """The paths of each file that has several."""
        paths: dict[tuple[int, int], list[str]] = {}
        for path, state in self.files.items():
            paths.setdefault(state.file, []).append(path)
        return tuple(tuple(group) for group in paths.values() if len(group) > 1)

    @property
    def has_logs_only(self) -> bool:
        """Whether no file in it is anything else."""
        return all(map(self.is_log, self.files))

    @property
    def last_saved(self) -> str:
        """The largest file of those that may be of the last save; no log; "" if there is none."""
        saved = {path: file for path, file in self.files.items() if not self.is_log(path)}
        since = max((file.mtime_ns for file in saved.values()), default=0) - _SAVE_NS
        last = [(f.bytes, f.mtime_ns, path) for path, f in saved.items() if f.mtime_ns >= since]
        return max(last)[2] if last else ""

    def changed_after(self, time_ns: int) -> str | None:
        """Return one file that changed after that time, or None; logs may change.

        A time in the future was stamped before the clock was set back, and does not count.
        """
        now, files = time.time_ns(), self.files.items()
        return next(
            (p for p, f in files if time_ns < f.ctime_ns <= now and not self.is_log(p)), None
        )

    @property
    def newest(self) -> str:
        """The file that changed last."""
        return max(self.files, key=lambda path: self.files[path].ctime_ns)

    @property
    def written_ns(self) -> int:
        """When a file last changed; logs do not count, as they grow even when nothing is saved."""
        times = (file.ctime_ns for p, file in self.files.items() if not self.is_log(p))
        return max(times, default=self.began_ns)

    @property
    def settles_in_ns(self) -> int:
        """How long until any later change of a file will show in its times; 0 if it does now."""
        ends = [0]
        for path, file in self.files.items():
            tick = 2 * _SECOND_NS if file.ctime_ns % _SECOND_NS == 0 else _TICK_NS
            if not self.is_log(path) and abs(self.began_ns - file.ctime_ns) <= tick:
                ends.append(file.ctime_ns + tick + 1 - self.began_ns)
        return max(ends)

    def is_log(self, path: str) -> bool:
        """Whether the file is a log."""
        return is_named_log(path) if self.logs is None else path in self.logs


def is_named_log(path: str, names: Sequence[str] = _LOGS) -> bool:
    """Whether the file is named like a log."""
    return any(fnmatch(path.rpartition("/")[2], pattern) for pattern in names)


def places_of(root: Root) -> dict[str, str]:
    """Return where the checkpoint folder is and, if some of it is kept, the working folder."""
    places = {FOLDER: Path(root)}
    if isinstance(root, Mirrored):
        places[KEPT] = root.working
    return {name: str(place.absolute()) for name, place in places.items()}


def saved_places(root: Root) -> list[Path]:
    """Return the checkpoint folder, and the files and folders that are kept."""
    return [Path(root), *(root / str(one) for one in getattr(root, "kept", ()))]


def leaves(root: Root, path: str, target: str) -> bool:
    """Whether a link points to something outside of the folder."""
    points_to = Path(os.path.normpath((root / path).parent / target))
    return not any(map(points_to.is_relative_to, saved_places(root)))


def list_folder(root: Root, logs: frozenset[str] | None = None) -> Listing:
    """List the folder now; SnapshotError if it is missing or a part of it cannot be listed."""
    files: dict[str, FileState] = {}
    links: dict[str, str] = {}
    folders: dict[str, FileState] = {}
    skipped: dict[str, str] = {}
    began_ns = time.time_ns()
    for path, found in sorted(_walk(root), key=itemgetter(0)):
        if stat.S_ISREG(found.st_mode):
            files[path] = FileState.of(found)
        elif stat.S_ISDIR(found.st_mode):
            folders[path] = FileState.of(found)
        elif stat.S_ISLNK(found.st_mode):
            try:
                links[path] = str((root / path).readlink())
            except OSError:  # replaced in the meantime
                continue
        else:
            skipped[path] = _kind(found.st_mode)
    return Listing(
        files=files, links=links, folders=folders, skipped=skipped, began_ns=began_ns, logs=logs
    )


def settled(root: Root, logs: frozenset[str] | None = None) -> Listing:
    """List the folder once any later change will show in a file's times; may raise ChangedError."""
    for _ in range(5):
        listing = list_folder(root, logs)
        if not (wait_ns := listing.settles_in_ns):
            return listing
        time.sleep(wait_ns / 1e9)
    raise ChangedError(f"{listing.newest} is being written")


def _walk(root: Root) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything below a folder, except what vanishes in the meantime."""
    pending = [""]
    for kept in root.kept if isinstance(root, Mirrored) else ():
        with suppress(OSError):  # it is not there yet; a link stands for what it leads to
            above = map(str, (*reversed(kept.parents[:-1]), kept))
            yield from [(path, (root / path).stat()) for path in above]
            pending.append(f"{kept}/")
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(root / prefix) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not prefix:
                raise SnapshotError(f"the folder {root} is gone") from error
            continue
        except OSError as error:
            raise SnapshotError(f"{error.filename}: {error.strerror}") from error
        for entry in found:
            if not prefix and entry.name == _NOT_OURS:
                continue
            if not prefix and entry.name == KEPT and isinstance(root, Mirrored):
                raise SnapshotError(f"{entry.path} has a name that snapshots need; rename it")
            path = f"{prefix}{entry.name}"
            try:
                about = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SnapshotError(f"{entry.path}: {error.strerror}") from error
            yield path, about
            if stat.S_ISDIR(about.st_mode):
                pending.append(f"{path}/")


def _differing(mine: Mapping[str, object], others: Mapping[str, object]) -> str:
    paths = sorted(mine.keys() ^ others.keys())
    return paths[0] if paths else next(p for p in mine if mine[p] != others[p])


def _kind(mode: int) -> str:
    kinds = {stat.S_ISSOCK: "a socket", stat.S_ISFIFO: "a pipe"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
