"""A dataset in a local folder: its manifest, and files that are used only once verified.

A sync may still be filling the folder: then `file` waits for one file, and `folder` for all.

A file counts as verified, and is not hashed again, while its size, inode and change time stay the
same; another machine verifies it again. What was verified, and what a trainer reads next, is
recorded next to the files, in records that only ever grow.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from contract.errors import UserError
from contract.file_names import walked
from contract.keys import MANIFEST, UNFINISHED
from contract.program import WORKLOAD as PROGRAM
from contract.source import NOT_TEXT
from training.durable.store.folder import write_whole
from training.durable.store.protocol import StoreError, writing
from training.durable.store.transfer import FAST, has_fast_hash, new_hash
from training.durable.tally import Tally

RECORD = ".verified.jsonl"
# What a trainer will read next from a folder that a sync is filling: lists of names, the newest
# list first. It affects time, never numbers.
READS = ".reads.jsonl"
_MACHINE_ID = Path("/etc/machine-id")
_CHUNK = 4 * 1024 * 1024

# name, bytes, sha256 and perhaps xxh128 of a file, as in the manifest
Entry: TypeAlias = Mapping[str, Any]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    return checksums_of(path, ("sha256",))["sha256"]


def checksums_of(path: Path, names: Iterable[str] = ()) -> dict[str, str]:
    """Return the file's checksums by name; without `names`, those of a new manifest."""
    names = names or ("sha256", FAST)[: 1 + has_fast_hash()]
    digests = {name: new_hash(is_fast=name == FAST) for name in names}
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            for digest in digests.values():
                digest.update(chunk)
    return {name: digest.hexdigest() for name, digest in digests.items()}


def compared_in(entry: Entry) -> str:
    """Return which of a file's checksums to compare: the fast one where it has it."""
    return FAST if entry.get(FAST) and has_fast_hash() else "sha256"


class VerifiedFiles:
    """The record of one folder. Another process may append while this one reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machine = _machine()
        self._known: dict[str, Any] = {}
        self._record = AppendedLines(folder / RECORD)
        self._lock = threading.Lock()

    def holds(self, entry: Entry) -> bool:
        """Whether the file has been verified here and has not been touched since."""
        identity = self._identity(entry)
        if identity is None:
            return False
        with self._lock:
            if self._known.get(entry["name"]) != identity:
                self._read_more()
            return bool(self._known.get(entry["name"]) == identity)

    def verify(self, entry: Entry, *, again: bool = False) -> bool:
        """Whether the file has the manifest's size and checksum; `again` hashes it in any case."""
        if not again and self.holds(entry):
            return True
        path, before, name = self._folder / entry["name"], self._identity(entry), compared_in(entry)
        if before is None or checksums_of(path, (name,))[name] != entry[name]:
            return False
        self.add(entry, before)
        return True

    def add(self, entry: Entry, identity: Any = None) -> None:
        """Record a file that its writer has just verified, or that had this identity then."""
        name, identity = entry["name"], identity or self._identity(entry)
        with self._lock:
            self._known[name] = identity
            # Where the folder cannot be written to, every process verifies for itself.
            self._record.append([self._machine, name, identity])

    def _identity(self, entry: Entry) -> list[Any] | None:
        """Return what changes when the file does; None if it is missing or has another size."""
        path = self._folder / entry["name"]
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry["bytes"]:
            return None
        return [entry["sha256"], found.st_size, found.st_ino, found.st_ctime_ns]

    def _read_more(self) -> None:
        """Read what was appended since; lines of other machines, and damaged ones, do not count."""
        for line in self._record.new():
            with contextlib.suppress(ValueError, TypeError):
                machine, name, identity = json.loads(line)
                if machine == self._machine:
                    self._known[name] = identity


def _machine() -> str:
    """Return a name that no two machines share, as far as they can be distinguished."""
    name = platform.node()
    with contextlib.suppress(OSError):
        name += f" {_MACHINE_ID.read_text().strip()}"
    return name


def announce(folder: Path, names: Iterable[str]) -> None:
    """Ask the folder's sync for these files, in this order, before all others."""
    # If the folder cannot be written to, the files come all the same, only later.
    AppendedLines(folder / READS).append(list(names))


class AppendedLines:
    """The lines of a file that other processes append to, each returned once and complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def append(self, record: Any) -> None:
        """Append a record as JSON; no-op where the file cannot be written to."""
        with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
            # A line break first: a writer that was killed may have left half a line.
            file.write(f"\n{json.dumps(record)}\n".encode())

    def new(self) -> Iterator[str]:
        """Yield the lines appended since; none if the file is missing or another user's."""
        try:
            if self._path.stat().st_size == self._position:
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in filter(None, whole.split(b"\n")):
            yield line.decode(errors="replace")


# The manifest of a folder that a sync is filling; the sync renames it when every file is there.
ARRIVING = f".{MANIFEST}.part"
_LOCK = ".sync.lock"
_OWN = (MANIFEST, ARRIVING, RECORD, READS, _LOCK, UNFINISHED)
_NUM_THREADS = 8
_MOST_FUTURES = 2000  # each takes more memory than a file's entry
_POLL_SECONDS = 0.2

# files done, files in total, bytes done so far
FileProgress: TypeAlias = Callable[[int, int, int], None]


def no_progress(done: int, total: int, size: int) -> None:
    """Show nothing."""


class LocalDataset:
    """A dataset whose files are in a folder, or will be once the sync has fetched them."""

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        *,
        arriving: VerifiedFiles | None = None,
        waiting: Callable[[], None] = lambda: None,
        patience_seconds: float = 0.0,
    ) -> None:
        """`waiting` is called a few times per second while `file` or `folder` waits.

        A failed sync may be retried, so another one is awaited for `patience_seconds`.
        """
        self.manifest = manifest
        self.fingerprint = _fingerprint_of(manifest)
        self._folder = folder
        self._arriving = arriving
        self._waiting = waiting
        self._patience_seconds = patience_seconds

    @staticmethod
    def checksums_of(path: Path) -> dict[str, str]:
        """Return a finished file's checksums by their names in a manifest."""
        return checksums_of(path)

    @classmethod
    def complete(cls, folder: Path, workload: str, meta: Mapping[str, Any]) -> "LocalDataset":
        """Write a manifest.json of every file in `folder`, which completes the dataset."""
        content = list_files(folder, workload, meta)
        write_whole(folder / MANIFEST, content)
        (folder / UNFINISHED).unlink(missing_ok=True)
        verified, manifest = VerifiedFiles(folder), json.loads(content)
        for entry in manifest["files"]:
            verified.add(entry)
        return cls(folder, manifest)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        again: bool = False,
        progress: FileProgress = no_progress,
        waiting: Callable[[], None] = lambda: None,
        patience_seconds: float = 0.0,
    ) -> "LocalDataset":
        """Open a local dataset. Each file is hashed once per machine (with `again`, now).

        A folder without a manifest is one that no workload made: its files count as they are now,
        and nothing is written there. With `again` it is refused, as nothing vouches for them.
        While a sync is filling the folder, the dataset opens at once and waits for its files (with
        `again`, for the sync to end), and for `patience_seconds` even where a sync has failed.
        """
        if not folder.is_dir() or not any(folder.iterdir()):
            state = "does not exist"
            if folder.exists():
                state = "is empty" if folder.is_dir() else "is a file"
            raise UserError(
                f"the dataset folder {folder} {state}; make one with "
                "`python -m training data make` or fetch one with `data sync`"
            )
        verified = VerifiedFiles(folder)
        deadline = time.monotonic() + patience_seconds
        while (again and is_syncing(folder)) or (
            _is_left_unfinished(folder) and time.monotonic() < deadline
        ):
            waiting()
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(FileNotFoundError):  # the sync has just ended
            if is_syncing(folder):
                manifest = parse_manifest((folder / ARRIVING).read_bytes(), str(folder))
                return cls(
                    folder,
                    manifest,
                    arriving=verified,
                    waiting=waiting,
                    patience_seconds=patience_seconds,
                )
        path = folder / MANIFEST
        if not path.is_file():
            if (folder / ARRIVING).is_file():
                # Not a UserError, which would end the run: a machine's boot syncs again.
                raise StoreError(f"the sync of {folder} was interrupted; sync it again")
            refuse_unfinished(folder)
            if not again:
                return cls(folder, json.loads(list_files(folder, PROGRAM, {}, progress)))
            raise UserError(
                f"{folder} has no {MANIFEST} with its files' checksums; check a folder that "
                "`python -m training data` has made, imported or synced"
            )
        manifest = parse_manifest(path.read_bytes(), str(path))
        check = partial(_checked, folder, verified, again=again)
        for_each_file(manifest["files"], check, progress)
        return cls(folder, manifest)

    @property
    def folder(self) -> Path:
        """The folder, with every file in it. Waits for the sync if one is filling it."""
        if self._arriving is not None:
            for entry in self.manifest["files"]:
                self._wait_for(entry, self._arriving, lambda: None)
            self._arriving = None
        return self._folder

    def file(self, name: str) -> Path:
        """Return one verified file. Waits for the sync if one is filling the folder."""
        entry = self._entries.get(name)
        if entry is None:
            raise UserError(f"the dataset {self._folder} has no file {name!r} in its {MANIFEST}")
        if self._arriving is not None:
            self._wait_for(entry, self._arriving, lambda: announce(self._folder, [name]))
        return self._folder / name

    def expect(self, names: Sequence[str]) -> None:
        """Ask a sync that is filling the folder to fetch these files first, in this order."""
        if self.is_arriving:
            announce(self._folder, names)

    @cached_property
    def _entries(self) -> Mapping[str, Entry]:
        """The entries by name: a workload may ask for a file for every sample."""
        return {entry["name"]: entry for entry in self.manifest["files"]}

    @property
    def is_arriving(self) -> bool:
        """Whether a sync is still filling the folder."""
        return self._arriving is not None and is_syncing(self._folder)

    @property
    def meta(self) -> Mapping[str, Any]:
        """The workload's own facts, as its `make_dataset` returned them."""
        meta: Mapping[str, Any] = self.manifest["meta"]
        return meta

    def _wait_for(self, entry: Entry, arriving: VerifiedFiles, ask: Callable[[], None]) -> None:
        if arriving.holds(entry):
            return
        ask()
        with Tally.timed("sync"):
            seen = time.monotonic()
            while not arriving.holds(entry):
                if is_syncing(self._folder):
                    seen = time.monotonic()
                # Hashed here if the sync could not record what it had verified.
                elif arriving.verify(entry):
                    return
                elif time.monotonic() - seen >= self._patience_seconds:
                    raise StoreError(
                        f"the sync of {self._folder} ended without {entry['name']}; sync it again"
                    )
                self._waiting()
                time.sleep(_POLL_SECONDS)


def _fingerprint_of(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 over names and checksums of all files."""
    lines = [f"{entry['name']} {entry['sha256']}\n" for entry in manifest["files"]]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def list_files(
    folder: Path, workload: str, meta: Mapping[str, Any], progress: FileProgress = no_progress
) -> bytes:
    """Return the content of a manifest.json of every file in `folder`; write nothing there."""
    own = [folder / name for name in _OWN]
    found = (Path(below, name) for below, _, names in walked(folder) for name in names)
    paths = sorted(path for path in found if path.is_file() and path not in own)
    if not paths:
        raise UserError(f"{folder} contains no files; put the dataset's files there")
    for path in paths:
        if NOT_TEXT.search(str(path.relative_to(folder))):
            raise UserError(f"{os.fsencode(path)!r} has a name that is not UTF-8; rename it")
    sums = dict[str, dict[str, str]]()
    files: list[Entry] = [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size}
        for path in paths
    ]

    def add_checksum(entry: Entry) -> bool:
        sums[entry["name"]] = checksums_of(folder / entry["name"])
        return True

    for_each_file(files, add_checksum, progress)
    files = [{**entry, **sums[entry["name"]]} for entry in files]
    return manifest_of(folder.resolve().name, workload, meta, files)


def manifest_of(name: str, workload: str, meta: Mapping[str, Any], files: Sequence[Entry]) -> bytes:
    """Return the content of a manifest.json."""
    manifest = {
        "format": 1,
        "workload": workload,
        "name": name,
        "files": files,
        "meta": dict(meta),
    }
    return json.dumps(manifest, indent=1).encode()


def refuse_unfinished(folder: Path) -> None:
    """Raise UserError if an import or a generator was interrupted there."""
    if (folder / UNFINISHED).is_file():
        raise UserError(
            f"{folder} has an unfinished dataset; finish it with the command that began it"
        )


def is_programs_own(folder: Path) -> bool:
    """Whether no workload made this folder: its files may change, with or without a manifest."""
    path = folder / MANIFEST
    if is_syncing(folder) or not folder.is_dir():
        return False
    if not path.is_file():
        return not (folder / ARRIVING).exists()
    return bool(parse_manifest(path.read_bytes(), str(folder))["workload"] == PROGRAM)


def kept_beside(folder: Path) -> Sequence[Path]:
    """Return what is kept in a dataset's folder beside its files: none of them is the dataset's."""
    is_ours = (folder / MANIFEST).exists() or (folder / _LOCK).exists()
    return [Path(name) for name in _OWN if is_ours]


def _is_left_unfinished(folder: Path) -> bool:
    return (
        (folder / ARRIVING).is_file()
        and not (folder / MANIFEST).is_file()
        and not is_syncing(folder)
    )


def left_behind(folder: Path, files: Iterable[Entry]) -> list[str]:
    """Return what the last sync brought, `files` lack and nobody has changed.

    Nothing where this sync is the first: what was made there stays.
    """
    before, names = list[Entry](), {entry["name"] for entry in files}
    for last in (MANIFEST, ARRIVING) if (folder / _LOCK).exists() else ():  # finished or not
        with contextlib.suppress(OSError, UserError):
            before += parse_manifest((folder / last).read_bytes(), "")["files"]
    holds = VerifiedFiles(folder).holds
    return sorted({e["name"] for e in before if e["name"] not in names and holds(e)})


def _checked(folder: Path, verified: VerifiedFiles, entry: Entry, *, again: bool) -> bool:
    file = folder / entry["name"]
    if verified.verify(entry, again=again):
        return True
    if not file.is_file():
        raise UserError(f"{file} is missing; sync the dataset again")
    if file.stat().st_size != entry["bytes"]:
        raise UserError(
            f"{file} has {file.stat().st_size} bytes, not {entry['bytes']} as in the manifest; "
            "sync it again"
        )
    raise UserError(f"{file} does not match its checksum in the manifest; sync it again")


@contextlib.contextmanager
def syncing(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with this process; wait for another sync to end."""
    path = folder / _LOCK
    with contextlib.ExitStack() as stack:
        with writing(path):
            lock = stack.enter_context(path.open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_syncing(folder: Path) -> bool:
    """Whether a sync holds the folder's lock."""
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Closing is not enough: a process forked since then has the file open too.
            fcntl.flock(lock, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return False  # there is no lock, or the file system has none
    return False


def for_each_file(
    files: Iterable[Entry], act: Callable[[Entry], bool], progress: FileProgress
) -> list[Entry]:
    """Call `act` for all files in parallel; return those for which it returned True."""
    entries, acted, done, size = list(files), list[Entry](), 0, 0
    pool = ThreadPoolExecutor(_NUM_THREADS)
    try:
        firsts = range(0, len(entries), _MOST_FUTURES)
        some = (pool.map(act, entries[first : first + _MOST_FUTURES]) for first in firsts)
        for entry, did in zip(entries, chain.from_iterable(some), strict=True):
            done, size = done + 1, size + entry["bytes"]
            if did:
                acted.append(entry)
            progress(done, len(entries), size)
    finally:
        # After an error, files that have not begun are skipped.
        pool.shutdown(cancel_futures=True)
    return acted


def parse_manifest(data: bytes, where: str) -> dict[str, Any]:
    """Parse a manifest; UserError if it is invalid or names a file outside the dataset."""
    try:
        manifest = json.loads(data)
        entries, meta = manifest["files"], manifest["meta"]
        names = [str(e["name"]) for e in entries]
        is_known = manifest["format"] == 1 and isinstance(manifest["workload"], str)
        is_known &= all(e["bytes"] >= 0 and e["sha256"] for e in entries)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: invalid {MANIFEST} ({error!r}); make it again") from error
    if not is_known or not isinstance(meta, dict):
        raise UserError(f"{where}: {MANIFEST} has an unknown format; make it again")
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise UserError(f"{where}: {MANIFEST} lists {name!r}, which is outside the dataset")
    return dict(manifest)
