"""Datasets between a store and a local folder: upload, wait for, sync.

    python -m training data sync --dataset-uri s3://bucket/trajectory --out /data/dataset

Missing files are fetched in the order in which training will read them, in parts by several
threads. A part that arrives early stays in memory until it is hashed: a thread takes a buffer
before a part, so that the part to be hashed next always has one. A file takes its name only once it
is complete and its checksum matches.

Also reads files that users bring from a store, and writes a dataset to one while it is made; other
processes are sent the URI and open the store themselves. Imports no torch: it runs at boot.
"""

import hashlib
import json
import mmap
import shlex
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

from contract.errors import UserError
from contract.file_names import MOST_NAME_BYTES
from contract.keys import MANIFEST
from contract.program import WORKLOAD as PROGRAM
from training.durable.dataset_output import FinishedFiles, FolderOutput, Output, locked_folder
from training.durable.sources import Brought, places_of
from training.durable.store.folder import FolderStore, UnfinishedFile, open_store, write_whole
from training.durable.store.local_dataset import (
    ARRIVING,
    READS,
    AppendedLines,
    Entry,
    FileProgress,
    LocalDataset,
    VerifiedFiles,
    compared_in,
    for_each_file,
    is_programs_own,
    left_behind,
    list_files,
    manifest_of,
    no_progress,
    parse_manifest,
    refuse_unfinished,
    syncing,
)
from training.durable.store.protocol import Store, StoreError, writing
from training.durable.store.transfer import FAST, PART_BYTES, new_hash, num_parts, run_all, write_at

_BLOCK_BYTES = 4096  # of a file system: what a small file takes


@dataclass(frozen=True, kw_only=True, slots=True)
class _SyncResult:
    """Files and bytes of a synced or uploaded dataset, those transferred, and the time."""

    files: int
    bytes: int
    fetched_files: int
    fetched_bytes: int
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        """Speed over the entire dataset, including files that were only verified."""
        return self.bytes / 1e6 / max(self.seconds, 1e-9)


class StoredDataset:
    """A dataset in a store: s3://bucket/prefix, or a folder."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @staticmethod
    def complete(output: Output, workload: str, made: FinishedFiles) -> None:
        """Write the manifest of a dataset whose files are in place."""
        name = output.where.rpartition("/")[2]
        output.write(MANIFEST, manifest_of(name, workload, made.meta, made.files))
        if isinstance(output, FolderOutput):
            verified = VerifiedFiles(Path(output.where))
            for entry in made.files:
                verified.add(entry)

    @property
    def manifest(self) -> dict[str, Any] | None:
        """Its manifest; None if it has none, as while it is uploaded."""
        found = self._store.get(MANIFEST)
        return parse_manifest(found.data, self._store.uri) if found else None

    def require(self) -> bytes:
        """Return the content of its manifest; UserError if there is none."""
        found = self._store.get(MANIFEST)
        if found is None:
            raise UserError(
                f"{self._store.uri} has no {MANIFEST}; upload a dataset with "
                f"`python -m training data upload DIR --dataset-uri {self._store.uri}`"
            )
        return found.data

    def wait(self, wait_seconds: float, missing: Callable[[], None]) -> bool:
        """Wait for a manifest; return whether it came. `missing` is called if it must come yet."""
        deadline = time.monotonic() + wait_seconds
        if self._store.get(MANIFEST) is not None:
            return True
        missing()
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(5.0, max(0.05, wait_seconds / 100), left))
            if self._store.get(MANIFEST) is not None:
                return True
        return False

    def upload(self, folder: Path, progress: FileProgress) -> _SyncResult:
        """Verify and upload a folder, the manifest last.

        A program's folder is its user's: the manifest lists all its files as they are now, and is
        written to the store only. A file is skipped if the store has it, and has the same checksum
        for it in its manifest.
        """
        began, store = time.monotonic(), self._store
        refuse_unfinished(folder)
        if is_programs_own(folder):
            manifest = list_files(folder, PROGRAM, {})
        else:
            LocalDataset.open(folder, again=True)
            manifest = (folder / MANIFEST).read_bytes()
        files = parse_manifest(manifest, str(folder))["files"]
        _refuse_long_keys(store.uri, files)
        before = self.manifest
        known = before["files"] if before else []
        same = {(entry["name"], entry["sha256"]) for entry in known}
        there = store.sizes("")
        store.sweep("")

        def send(entry: Mapping[str, Any]) -> bool:
            name = entry["name"]
            if (name, entry["sha256"]) in same and there.get(name) == entry["bytes"]:
                return False
            store.put_file(name, folder / name)
            return True

        fetched = for_each_file(files, send, progress)
        store.put(MANIFEST, manifest)
        return _synced(files, fetched, began)

    def sync(
        self, out: Path, progress: FileProgress, begun: Callable[[], None] = lambda: None
    ) -> _SyncResult:
        """Fetch missing and damaged files into `out`, verify all, and write the manifest last.

        Once `begun` is called, whoever opens the folder can use each file as soon as it is
        verified, and can ask for files to be fetched first (`LocalDataset.expect`).
        """
        began, store, manifest = time.monotonic(), self._store, self.require()
        files = parse_manifest(manifest, store.uri)["files"]
        _refuse_long_names(store.uri, files)
        out.mkdir(parents=True, exist_ok=True)
        if out.resolve() == Path(store.uri).resolve():
            LocalDataset.open(out, again=True)
            return _synced(files, [], began)
        _refuse_small_disk(store.uri, files, out)
        if any(out.iterdir()) and not any((out / own).exists() for own in (MANIFEST, ARRIVING)):
            for path in (out / each["name"] for each in files if (out / each["name"]).is_file()):
                raise UserError(f"{path} was not synced, and would be replaced; use a new folder")
        gone = left_behind(out, files)
        # Also before the lock: whoever sees the lock held finds this manifest, not an older one.
        write_whole(out / ARRIVING, manifest)
        with syncing(out):
            UnfinishedFile.sweep(out)
            write_whole(out / ARRIVING, manifest)
            with writing(out):
                FolderOutput(out).delete(gone)
            begun()
            fetched = fetch_missing(store, files, out, progress)
            (out / READS).unlink(missing_ok=True)
            (out / ARRIVING).replace(out / MANIFEST)
        return _synced(files, fetched, began)

    def fetched(self, scratch: Path, progress: FileProgress = no_progress) -> LocalDataset:
        """Open it here; from S3 it is synced into `scratch` first."""
        folder = Path(self._store.uri)
        if self._store.uri.startswith("s3://"):
            folder = scratch / "dataset"
            self.sync(folder, progress)
        return LocalDataset.open(folder)


def _refuse_long_keys(uri: str, files: Sequence[Entry]) -> None:
    from contract.aws_limits import most

    prefix, longest = uri.removeprefix("s3://").partition("/")[2], most("object-key-bytes")
    for name in (entry["name"] for entry in files if uri.startswith("s3://")):
        if (size := len(f"{prefix}/{name}".encode())) > longest:
            raise UserError(
                f"{name} would have a key of {size} bytes in {uri}, and S3 takes {longest}; "
                "shorten its folders or the prefix"
            )


def _refuse_long_names(uri: str, files: Sequence[Entry]) -> None:
    for part in (part for entry in files for part in entry["name"].split("/")):
        if (size := len(part.encode())) > MOST_NAME_BYTES:
            raise UserError(
                f"{uri} has a file whose name, {part[:40]}..., is {size} bytes long, and a disk "
                f"takes {MOST_NAME_BYTES}; upload it under a shorter name"
            )


def _refuse_small_disk(uri: str, files: Sequence[Entry], out: Path) -> None:
    has = shutil.disk_usage(out).total
    needs = sum(-(-entry["bytes"] // _BLOCK_BYTES) * _BLOCK_BYTES for entry in files)
    if 0 < has < needs:  # 0: this file system does not say
        raise UserError(
            f"{uri} takes {needs / 2**30:.2f} GiB on a disk, and that of {out} has "
            f"{has / 2**30:.2f}; use a larger one, for a stack -c data_on=ebs -c data_volume.gib=N"
        )


def _synced(files: Sequence[Entry], fetched: Sequence[Entry], began: float) -> _SyncResult:
    return _SyncResult(
        files=len(files),
        bytes=sum(entry["bytes"] for entry in files),
        fetched_files=len(fetched),
        fetched_bytes=sum(entry["bytes"] for entry in fetched),
        seconds=time.monotonic() - began,
    )


@cache
def _store(uri: str) -> Store:
    """Open a store once per process: it keeps its connections."""
    return open_store(uri)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredFile(Brought):
    """One file that a user brings, in a store."""

    uri: str
    size: int

    @property
    def num_bytes(self) -> int:
        return self.size

    def read(self) -> bytes:
        """Return its content; the store has retried what failed."""
        found = _store(self.uri).get(self.name)
        if found is None:
            raise UserError(f"{self.uri}/{self.name} was deleted during the import; restore it")
        return found.data


def stored_source(uri: str) -> list[_StoredFile]:
    """List the files below a URI, sorted by name: CLASS/FILE, perhaps below folders of splits.

    UserError for keys that no folder can have, except the empty ones that S3's console makes.
    """
    where = uri.rstrip("/")
    sizes = {key: n for key, n in _store(uri).sizes("").items() if n or key[-1:] not in "/"}
    for odd in [key for key in sizes if "" in key.split("/")][:1]:
        better = "/".join(filter(None, odd.split("/")))
        moved = shlex.join(["aws", "s3", "mv", f"{where}/{odd}", f"{where}/{better}"])
        raise UserError(
            f"{where} has the key {odd!r}, which has a / too many to be a file's name; rename it, "
            f"and others like it: {moved}"
        )
    if sizes and all(key.endswith((".tar", ".zip")) for key in sizes):
        raise UserError(
            f"{where} has archives, such as {min(sizes)}, which are not unpacked there; run "
            f"{shlex.join(['aws', 's3', 'sync', where, 'archives'])} and import the folder archives"
        )
    found = [
        _StoredFile(uri=uri, name=name, size=sizes[name], label=label, split=split, doubt=doubt)
        for name, label, split, doubt in places_of(sorted(sizes))
    ]
    if not found:
        raise UserError(f"{uri} has no files; use a prefix that has some")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOutput(Output):
    """A dataset that is uploaded file by file; only unfinished files are on this machine."""

    uri: str

    @property
    def where(self) -> str:
        return self.uri

    def working_folder(self) -> AbstractContextManager[Path]:
        _store(self.uri).sweep("")
        name = f"training-import-{hashlib.sha256(self.uri.encode()).hexdigest()[:16]}"
        return locked_folder(Path(tempfile.gettempdir()) / name)

    def sizes(self) -> Mapping[str, int]:
        return _store(self.uri).sizes("")

    def read(self, name: str) -> bytes | None:
        found = _store(self.uri).get(name)
        return found.data if found else None

    def write(self, name: str, content: bytes) -> None:
        _store(self.uri).put(name, content)

    def place(self, name: str, path: Path) -> None:
        """Upload it, and delete it here."""
        _store(self.uri).put_file(name, path)
        path.unlink()

    def delete(self, names: Iterable[str]) -> None:
        _store(self.uri).delete(names)


# Smaller parts take as long to be answered as to arrive, so more are requested at once.
_SMALL_PART_BYTES = 1024 * 1024
_MORE_THREADS = 4
_THREADS_A_SPARE = 2

_Buffers: TypeAlias = SimpleQueue[memoryview]


def fetch_missing(
    store: Store, files: Sequence[Entry], out: Path, progress: FileProgress
) -> list[Entry]:
    """Fetch what is missing or damaged in `out`, and verify the rest; return what was fetched."""
    count = _Count(len(files), progress)
    verified = VerifiedFiles(out)
    missing = _unverified(files, out, verified, count)
    fetched = list[Entry]()

    def placed(entry: Entry) -> None:
        verified.add(entry)
        fetched.append(entry)
        count.add(1, 0)

    queue = _Queue(missing, out, count)
    all_parts = sum(num_parts(entry["bytes"], PART_BYTES) for entry in missing)
    is_small = sum(entry["bytes"] for entry in missing) < all_parts * _SMALL_PART_BYTES
    num_threads = store.num_threads * (_MORE_THREADS if is_small else 1)
    largest = min(PART_BYTES, max((entry["bytes"] for entry in missing), default=0))
    num_threads = min(num_threads, all_parts)
    buffers = _Buffers()
    for _ in range(num_threads + num_threads // _THREADS_A_SPARE):
        buffers.put(memoryview(mmap.mmap(-1, max(1, largest))))
    fetch = partial(_fetch_parts, store, queue, buffers, placed)

    def stop() -> None:
        queue.stop()
        for _ in range(num_threads):  # some may wait for a buffer
            buffers.put(memoryview(b""))

    try:
        run_all([fetch] * num_threads, num_threads, when_failing=stop)
    except Exception:
        # Only now: a thread still writing could hit another file under the same descriptor.
        queue.discard()
        raise
    return fetched


def _unverified(
    files: Sequence[Entry], out: Path, verified: VerifiedFiles, count: "_Count"
) -> list[Entry]:
    """Return the missing or damaged ones, in order; hash the others unless that has been done."""
    there = FolderStore(out).sizes("")

    def is_damaged(entry: Entry) -> bool:
        is_verified = verified.verify(entry)
        if is_verified:
            count.add(1, entry["bytes"])
        return not is_verified

    known = [e for e in files if e["name"] in there]
    damaged = {e["name"] for e in for_each_file(known, is_damaged, no_progress)}
    return [e for e in files if e["name"] in damaged or e["name"] not in there]


class _Count:
    """Files that are in place and bytes that were hashed; any thread may count."""

    def __init__(self, total: int, progress: FileProgress) -> None:
        self._total, self._progress = total, progress
        self._done = self._bytes = 0
        self._lock = threading.Lock()

    def add(self, files: int, size: int) -> None:
        with self._lock:
            self._done, self._bytes = self._done + files, self._bytes + size
            self._progress(self._done, self._total, self._bytes)


def _fetch_parts(
    store: Store, queue: "_Queue", buffers: _Buffers, placed: Callable[[Entry], None]
) -> None:
    """Fetch parts in one thread until none is left."""
    buffer = buffers.get()
    while (task := queue.next()) is not None:
        file, number = task
        if file.fetch(store, number, buffer, buffers):
            placed(file.entry)
        buffer = buffers.get()
    buffers.put(buffer)


class _Queue:
    """The parts of the missing files, those of one file together, in the order of the reads."""

    def __init__(self, missing: Sequence[Entry], out: Path, count: _Count) -> None:
        # Backwards: the end of a dict is found at once, its front only past all that has gone.
        self._left = {entry["name"]: entry for entry in reversed(missing)}
        self._out, self._count = out, count
        self._reads = AppendedLines(out / READS)
        self._first: deque[str] = deque()
        self._file: _ArrivingFile | None = None
        self._next_part = 0
        self._begun = list[_ArrivingFile]()
        self._lock = threading.Lock()

    def next(self) -> "tuple[_ArrivingFile, int] | None":
        """Return a file and the number of its part to fetch; None after the last."""
        with self._lock:
            if self._file is None or self._next_part == self._file.num_parts:
                if not self._left:
                    return None
                entry = self._next_entry()
                self._file, self._next_part = _ArrivingFile(entry, self._out, self._count), 0
                self._begun = [file for file in self._begun if not file.is_placed] + [self._file]
            self._next_part += 1
            return self._file, self._next_part - 1

    def stop(self) -> None:
        """Hand out no more parts."""
        with self._lock:
            self._left, self._file = {}, None

    def discard(self) -> None:
        """Delete what has arrived of incomplete files."""
        for file in self._begun:
            file.discard()

    def _next_entry(self) -> Entry:
        for line in self._reads.new():
            with suppress(ValueError):  # damaged
                self._first.extendleft(reversed(json.loads(line)))
        while self._first:
            if (entry := self._left.pop(self._first.popleft(), None)) is not None:
                return entry
        return self._left.popitem()[1]


class _ArrivingFile:
    """One file on its way: its parts arrive in any order, and are hashed in sequence."""

    def __init__(self, entry: Entry, out: Path, count: _Count) -> None:
        self.entry, self._count = entry, count
        self.num_parts = num_parts(entry["bytes"], PART_BYTES)
        self._target = out / entry["name"]
        self._unfinished: UnfinishedFile | None = None
        self._arrived = dict[int, memoryview]()  # but not hashed yet
        self._checksum = compared_in(entry)
        self._digest = new_hash(is_fast=self._checksum == FAST)
        self._next = 0  # to hash
        self._is_hashing = False
        self._lock = threading.Lock()
        self.is_placed = False

    def fetch(self, store: Store, number: int, buffer: memoryview, buffers: _Buffers) -> bool:
        """Fetch a part; return whether that completes the file. Hashed parts free their buffers."""
        with self._lock:
            if self._unfinished is None:
                self._unfinished = UnfinishedFile(self._target)
        self._read(store, number, buffer)
        with self._lock:
            self._arrived[number] = buffer
            if self._is_hashing:
                return False
            self._is_hashing = True
        while self._next < self.num_parts:
            with self._lock:
                if self._next not in self._arrived:
                    self._is_hashing = False
                    return False
                buffer = self._arrived.pop(self._next)
            part = self._part(self._next, buffer)
            self._digest.update(part)
            self._count.add(0, len(part))
            self._next += 1
            if self._next < self.num_parts:
                buffers.put(buffer)
        self._place(store, buffer)
        buffers.put(buffer)
        return True

    def discard(self) -> None:
        """Delete what has arrived; no-op once the file is in place."""
        if self._unfinished is not None:
            self._unfinished.discard()

    def _read(self, store: Store, number: int, buffer: memoryview) -> memoryview:
        """Fetch a part into the buffer and the file."""
        data, start = self._part(number, buffer), number * PART_BYTES
        try:
            store.read_into(self.entry["name"], start, data)
        except (FileNotFoundError, StoreError) as error:
            raise self._explained(store, error) from error
        assert self._unfinished is not None
        with writing(self._target):
            write_at(self._unfinished.file, data, start)
        return data

    def _part(self, number: int, buffer: memoryview) -> memoryview:
        return buffer[: min(PART_BYTES, self.entry["bytes"] - number * PART_BYTES)]

    def _place(self, store: Store, buffer: memoryview) -> None:
        if not self.entry["bytes"] and store.get(self.entry["name"]) is None:
            raise self._explained(store, FileNotFoundError())
        if self._digest.hexdigest() != self.entry[self._checksum]:
            self._fetch_again(store, buffer)
        assert self._unfinished is not None
        self._unfinished.place()
        self.is_placed = True

    def _fetch_again(self, store: Store, buffer: memoryview) -> None:
        """Fetch all of it again, as the transfer may have failed; a third try would hide faults."""
        digest = new_hash(is_fast=self._checksum == FAST)
        for number in range(self.num_parts):
            digest.update(self._read(store, number, buffer))
        if digest.hexdigest() != self.entry[self._checksum]:
            # Not a UserError: a machine with failing memory or a failing disk finds the same.
            different = StoreError(
                f"{store.uri}/{self.entry['name']} does not match its checksum in the manifest; "
                "if another machine finds the same, copy it there again: uploads take it for sent"
            )
            raise self._explained(store, different)

    def _explained(self, store: Store, error: Exception) -> Exception:
        """Return the error, or the fault of the upload that explains it."""
        name, size = self.entry["name"], self.entry["bytes"]
        folder, slash, _ = name.rpartition("/")
        found = store.sizes(folder + slash).get(name)
        if found is None:
            return UserError(f"{store.uri}/{name} is in the manifest but missing; upload it again")
        if found != size:
            return UserError(
                f"{store.uri}/{name} has {found} bytes, not {size} as in the manifest; "
                "upload it again"
            )
        return error
