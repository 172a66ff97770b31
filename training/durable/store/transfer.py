"""Moves files in parts, to and from a store; each part is hashed by the thread that moves it.

The checksum of a file of one part is its hash; of several parts, the hash of their concatenated
digests: S3's composite checksum, so that S3 verifies on arrival what a reader verifies later. What
only has to arrive as it was sent has XXH3 of 128 bits (xxh128), a tenth of SHA-256's work; what is
named by its content has SHA-256, and so has everything where the package xxhash or the store's
word for it is missing. Memory: one part of PART_BYTES per thread. Imports no torch.
"""

import hashlib
import mmap
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from training.durable.errors import MachineError
from training.durable.store.protocol import Store, Upload

try:
    from xxhash import xxh3_128
except ModuleNotFoundError:
    xxh3_128 = None  # type: ignore[assignment, misc]

# With 16 threads half of the 256 MiB that streaming may take; 10,000 parts in S3 hold 80 GiB.
PART_BYTES = 8 * 1024 * 1024
MAX_PARTS = 10_000
# For a call with megabytes the kernel looks for as much contiguous memory, which took 3 to 8 times
# the CPU time (Linux 6.18, ext4).
_WRITE_BYTES = 256 * 1024
FAST = "xxh128"  # its name in records
_FAST_BYTES = 16

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def refuse_other_than_counts(record: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError if a field that is present is not an integer from 0 on."""
    for name in names:
        if name in record and (type(record[name]) is not int or record[name] < 0):
            raise ValueError(f"{name} is {record[name]!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    bytes: int
    # Of its bytes; for several parts, of their concatenated digests. One of the two is empty.
    sha256: str
    part_bytes: int | None = None  # None: one part
    xxh128: str = ""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "FileEntry":
        """Read what `asdict` returned; ValueError or TypeError for anything else."""
        if not _FILE_NAME.fullmatch(record["name"]):
            raise ValueError(f"the file name {record['name']!r} was not written by a trainer")
        refuse_other_than_counts(record, "bytes")
        if record.get("part_bytes") is not None:
            refuse_other_than_counts(record, "part_bytes")
            if not record["part_bytes"]:
                raise ValueError(f"{record['name']} has a wrong number of bytes")
        return cls(**record)

    def is_intact(self, store: Store, key: str) -> bool:
        """Whether the key has these bytes, which are read for it."""
        return receive(store, key, self, lambda at, data: None)


class CancelledError(RuntimeError):
    """The transfer was stopped by its caller."""


@dataclass(slots=True)
class TransferProgress:
    """The progress of a transfer; any thread may read it or stop the transfer."""

    done_bytes: int = 0
    total_bytes: int = 0  # 0: not known
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    moved_at: float = field(default_factory=time.monotonic)  # the last time any arrived

    def add(self, size: int) -> None:
        """Count bytes that have arrived."""
        with self.lock:
            self.done_bytes += size
            self.moved_at = time.monotonic()


def has_fast_hash() -> bool:
    """Whether this process can make and compare xxh128."""
    return xxh3_128 is not None


def new_hash(data: bytes | memoryview = b"", *, is_fast: bool) -> Any:
    """Return the hash of `data`, which more can be added to: xxh128 if fast, else SHA-256."""
    return xxh3_128(data) if is_fast else hashlib.sha256(data)


def is_fast_digest(digest: bytes) -> bool:
    """Whether it is xxh128, by its length."""
    return len(digest) == _FAST_BYTES


def checksum_of(digests: Sequence[bytes]) -> str:
    """Return the checksum of a file whose parts have these digests."""
    if len(digests) == 1:
        return digests[0].hex()
    joined, is_fast = b"".join(digests), is_fast_digest(digests[0])
    return str(new_hash(joined, is_fast=is_fast).hexdigest())


def num_parts(size: int, part_bytes: int) -> int:
    """Return the number of parts; at least one, as an empty file is one empty part."""
    return max(1, -(-size // part_bytes))


def run_all(
    tasks: Sequence[Callable[[], None]],
    num_threads: int,
    stop: threading.Event | None = None,
    when_failing: Callable[[], None] | None = None,
) -> None:
    """Run tasks in threads; raise the first error, or CancelledError once `stop` is set.

    `when_failing` is called at the first error, while other tasks are still under way.

    The threads are daemons, unlike those of an executor: a hung connection must not keep the
    process alive after its lease is released.
    """
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            if stop is not None and stop.is_set():
                errors.append(CancelledError("the transfer was stopped"))
                return
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                task()
            except BaseException as error:  # raised again below, in the caller's thread
                errors.append(error)
                if when_failing is not None:
                    when_failing()

    threads = [
        threading.Thread(target=work, name="transfer", daemon=True)
        for _ in range(min(num_threads, len(tasks)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# Fewer and larger requests cost less CPU (benchmarks/LOG.md), if each of 16 connections has two.
_SHARED_PART_BYTES = 32 * 1024 * 1024
_SHARED_PARTS = 32

# Returns that many bytes of host memory, which stay valid until the same thread calls it again.
Spare: TypeAlias = Callable[[int], memoryview]


class Contents:
    """The contents of one file to be written."""

    name: str
    memory = -1  # the file descriptor of memory that holds them, if another process can map it
    is_named_by_content = False  # by SHA-256, which it then has anyway

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        raise NotImplementedError

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        """Return bytes start to stop: in place if contiguous, else copied into spare memory."""
        raise NotImplementedError

    def digest(self, part: int, data: memoryview, *, is_fast: bool) -> bytes:
        """Return the digest of a part."""
        return bytes(new_hash(data, is_fast=is_fast).digest())


def write_at(file: int, data: memoryview, start: int) -> None:
    """Write all of `data` from the offset `start` on; other threads may write elsewhere."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done : done + _WRITE_BYTES], start + done)


def put_text(store: Store, prefix: str, name: str, data: bytes) -> FileEntry:
    """Write a small file below `prefix` in one request."""
    store.put(prefix + name, data)
    return FileEntry(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def part_bytes_of(size: int, *, is_shared: bool = False) -> int:
    """Return the part size for a file of `size` bytes; shared memory allows larger parts."""
    smallest = PART_BYTES * max(1, -(-num_parts(size, PART_BYTES) // MAX_PARTS))
    if not is_shared:
        return smallest
    count = num_parts(size, PART_BYTES) // _SHARED_PARTS
    return max(smallest, PART_BYTES * min(_SHARED_PART_BYTES // PART_BYTES, count))


def send(
    store: Store,
    prefix: str,
    files: Sequence[Contents],
    progress: TransferProgress,
    *,
    tasks: Sequence[Callable[[], None]] = (),
    allocate: Spare | None = None,
    num_threads: int | None = None,
) -> tuple[FileEntry, ...]:
    """Upload the files below `prefix`; if that fails or is stopped, all uploads are aborted.

    The `tasks` run at the same time; if one fails, everything fails. `allocate` makes the
    memory that a thread reads parts into.
    """
    num_threads = num_threads or store.num_threads
    sending = _Sending(store, prefix, files, progress, allocate or _mapped)
    try:
        run_all([*tasks, *sending.tasks()], num_threads, progress.stop, sending.fail)
        run_all([upload.finish for upload in sending.uploads], num_threads, progress.stop)
    except BaseException:
        for upload in sending.uploads:
            upload.abort()
        raise
    return tuple(
        FileEntry(name=file.name, bytes=file.size, part_bytes=size, **_checksums(own))
        for file, size, own in zip(files, sending.sizes, sending.digests, strict=True)
    )


def _checksums(digests: Sequence[bytes]) -> dict[str, str]:
    found = checksum_of(digests)
    return {"sha256": "", "xxh128": found} if is_fast_digest(digests[0]) else {"sha256": found}


@dataclass
class _Sending:
    """The parts of some files on their way to the store, and their digests."""

    store: Store
    prefix: str
    files: Sequence[Contents]
    progress: TransferProgress
    allocate: Spare

    def __post_init__(self) -> None:
        self.sizes = [part_bytes_of(file.size, is_shared=file.memory >= 0) for file in self.files]
        pairs = zip(self.files, self.sizes, strict=True)
        self.digests = [[b""] * num_parts(file.size, size) for file, size in pairs]
        self.uploads: list[Upload] = []  # of more than one part, or in shared memory
        self._of_thread = threading.local()
        self._has_failed = False

    def tasks(self) -> Iterator[Callable[[], None]]:
        """One task for each part, or for all of a file that is small or that another process sends.

        Only an upload of several parts stays open from the first to the last of them.
        """
        for number, file in enumerate(self.files):
            own = range(len(self.digests[number]))
            if file.memory < 0 and len(own) == 1:
                yield partial(self._put_all, number)
                continue
            upload = self._open(number)
            self.uploads.append(upload)
            if file.memory >= 0 and upload.is_ready():
                yield partial(self._put_shared, number, upload)
            else:
                yield from (partial(self._put, number, part, upload) for part in own)

    def fail(self) -> None:
        """Withdraw what another process still sends: a task has failed."""
        self._has_failed = True

    def _open(self, number: int) -> Upload:
        file, size = self.files[number], self.sizes[number]
        key, stop = self.prefix + file.name, self.progress.stop
        return self.store.upload(key, file.size, size, stop, not file.is_named_by_content)

    def _put(self, number: int, part: int, upload: Upload) -> None:
        file, size = self.files[number], self.sizes[number]
        start, stop = part * size, min((part + 1) * size, file.size)
        data = file.read(start, stop, self._spare)
        digest = file.digest(part, data, is_fast=upload.is_fast)
        upload.put(part, start, data, digest)
        self._arrived(number, part, digest)

    def _put_all(self, number: int) -> None:
        upload = self._open(number)
        try:
            self._put(number, 0, upload)
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def _put_shared(self, number: int, upload: Upload) -> None:
        file, size = self.files[number], self.sizes[number]
        for part, digest in upload.put_shared(file.memory, file.size, size, self._must_stop):
            self._arrived(number, part, digest)

    def _must_stop(self) -> bool:
        return self._has_failed or self.progress.stop.is_set()

    def _arrived(self, number: int, part: int, digest: bytes) -> None:
        self.digests[number][part] = digest
        size = self.sizes[number]
        self.progress.add(min(size, self.files[number].size - part * size))

    def _spare(self, size: int) -> memoryview:
        block: memoryview | None = getattr(self._of_thread, "block", None)
        if block is None or len(block) < size:
            block = self._of_thread.block = self.allocate(size)
        return block[:size]


def _mapped(size: int) -> memoryview:
    """Map host memory, which freeing returns: malloc would keep a block for each thread."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def receive(
    store: Store,
    key: str,
    entry: FileEntry,
    place: Callable[[int, memoryview], None],
    *,
    start: int = 0,
    num_threads: int | None = None,
) -> bool:
    """Read a file, from byte `start` of the key, passing its bytes to `place(at, bytes)`.

    `place` must copy them. Return whether the file is intact.
    """
    is_fast = bool(entry.xxh128)
    if is_fast and not has_fast_hash():
        raise MachineError(
            f"{entry.name} was saved with xxh128, which this Python cannot compute without the "
            "package xxhash; install it (pip install xxhash)"
        )
    size = entry.part_bytes or max(entry.bytes, 1)
    digests = [b""] * num_parts(entry.bytes, size)

    def read_part(part: int) -> None:
        begin, stop = part * size, min((part + 1) * size, entry.bytes)
        buffer = _mapped(min(PART_BYTES, stop - begin))
        digest = new_hash(is_fast=is_fast)
        for first in range(begin, max(stop, begin + 1), PART_BYTES):
            data = buffer[: stop - first]
            store.read_into(key, start + first, data)
            digest.update(data)
            place(first, data)
        digests[part] = digest.digest()

    tasks = [partial(read_part, part) for part in range(len(digests))]
    run_all(tasks, num_threads or store.num_threads)
    return checksum_of(digests) == (entry.xxh128 or entry.sha256)


def send_file(store: Store, key: str, path: Path) -> None:
    """Upload a file in parts."""
    size = path.stat().st_size
    part_bytes = part_bytes_of(size)
    upload = store.upload(key, size, part_bytes, threading.Event(), True)

    def put(part: int) -> None:
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), part_bytes, part * part_bytes)
        digest = new_hash(data, is_fast=upload.is_fast).digest()
        upload.put(part, part * part_bytes, memoryview(data), digest)

    try:
        parts = range(num_parts(size, part_bytes))
        run_all([partial(put, part) for part in parts], store.num_threads)
        upload.finish()
    except BaseException:
        upload.abort()
        raise


def receive_file(store: Store, key: str, size: int, path: Path) -> None:
    """Download a key of `size` bytes in parts."""
    entry = FileEntry(name=path.name, bytes=size, sha256="", part_bytes=PART_BYTES)
    # Not next to `path`, where a killed process would leave it.
    with path.open("wb") as file:
        receive(store, key, entry, lambda at, data: write_at(file.fileno(), data, at))
