"""Files to and from a store in parallel parts, each hashed by the thread that moves it.

Memory: one part of PART_BYTES per thread. Imports no torch.
"""

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from training.record.checkpoint_entry import FileEntry
from training.store import parts
from training.store.parts import TransferProgress, checksum_of, num_parts, run_all
from training.store.protocol import SharedUpload, Store, Upload

# Fewer and larger requests cost less CPU (benchmarks/LOG.md), if each of 16 connections has two.
_SHARED_PART_BYTES = 32 * 1024 * 1024
_SHARED_PARTS = 32

# Returns that many bytes of host memory, which stay valid until the same thread calls it again.
Spare: TypeAlias = Callable[[int], memoryview]


class Contents:
    """The contents of one file that is to be written."""

    name: str
    memory = -1  # the file descriptor of memory that holds them, if another process can map it

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        raise NotImplementedError

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        """Bytes start to stop: where they lie if contiguous, else copied into spare memory."""
        raise NotImplementedError

    def digest(self, part: int, data: memoryview) -> bytes:
        """The SHA-256 of a part."""
        return hashlib.sha256(data).digest()


class Text(Contents):
    """A small file of known bytes."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        return memoryview(self._data)[start:stop]


def part_bytes_of(size: int, *, is_shared: bool = False) -> int:
    """Bytes per part of a file of `size` bytes, which needs no buffers if memory is shared."""
    smallest = parts.part_bytes_of(size)
    if not is_shared:
        return smallest
    count = num_parts(size, parts.PART_BYTES) // _SHARED_PARTS
    return max(smallest, parts.PART_BYTES * min(_SHARED_PART_BYTES // parts.PART_BYTES, count))


def send(
    store: Store,
    prefix: str,
    files: Sequence[Contents],
    progress: TransferProgress,
    *,
    beside: Sequence[Callable[[], None]] = (),
    allocate: Spare | None = None,
    num_threads: int | None = None,
) -> tuple[FileEntry, ...]:
    """Upload the files below `prefix`; if that fails or is stopped, all uploads are aborted.

    The tasks `beside` run meanwhile; if one fails, everything fails. `allocate` makes the memory
    that a thread reads parts into.
    """
    num_threads = num_threads or store.num_threads
    sending = _Sending(store, prefix, files, progress, allocate or _mapped)
    try:
        run_all([*beside, *sending.tasks()], num_threads, progress.stop, sending.fail)
        run_all([upload.finish for upload in sending.uploads], num_threads, progress.stop)
    except BaseException:
        for upload in sending.uploads:
            upload.abort()
        raise
    return tuple(
        FileEntry(name=file.name, bytes=file.size, sha256=checksum_of(own), part_bytes=size)
        for file, size, own in zip(files, sending.sizes, sending.digests, strict=True)
    )


class _Sending:
    """The parts of some files on their way to the store, and their digests."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        files: Sequence[Contents],
        progress: TransferProgress,
        allocate: Spare,
    ) -> None:
        self.sizes = [part_bytes_of(file.size, is_shared=file.memory >= 0) for file in files]
        self.digests = [
            [b""] * num_parts(file.size, size) for file, size in zip(files, self.sizes, strict=True)
        ]
        self.uploads: list[Upload] = []  # of more than one part, or in shared memory
        self._store, self._prefix, self._files = store, prefix, files
        self._progress = progress
        self._allocate = allocate
        self._of_thread = threading.local()
        self._has_failed = False

    def tasks(self) -> Iterator[Callable[[], None]]:
        """One task for each part, or for all of a file that is small or that another process sends.

        Only what has several parts stays open from the first to the last of them.
        """
        for number, file in enumerate(self._files):
            own = range(len(self.digests[number]))
            if file.memory < 0 and len(own) == 1:
                yield partial(self._put_all, number)
                continue
            upload = self._open(number)
            self.uploads.append(upload)
            if file.memory >= 0 and isinstance(upload, SharedUpload) and upload.is_ready():
                yield partial(self._put_shared, number, upload)
            else:
                yield from (partial(self._put, number, part, upload) for part in own)

    def fail(self) -> None:
        """Withdraw what another process still sends: a task has failed."""
        self._has_failed = True

    def _open(self, number: int) -> Upload:
        file, size = self._files[number], self.sizes[number]
        key = self._prefix + file.name
        return self._store.upload(key, file.size, size, self._progress.stop)

    def _put(self, number: int, part: int, upload: Upload) -> None:
        file, size = self._files[number], self.sizes[number]
        start, stop = part * size, min((part + 1) * size, file.size)
        data = file.read(start, stop, self._spare)
        digest = file.digest(part, data)
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

    def _put_shared(self, number: int, upload: SharedUpload) -> None:
        file, size = self._files[number], self.sizes[number]
        for part, digest in upload.put_shared(file.memory, file.size, size, self._must_stop):
            self._arrived(number, part, digest)

    def _must_stop(self) -> bool:
        return self._has_failed or self._progress.stop.is_set()

    def _arrived(self, number: int, part: int, digest: bytes) -> None:
        self.digests[number][part] = digest
        size = self.sizes[number]
        self._progress.add(min(size, self._files[number].size - part * size))

    def _spare(self, size: int) -> memoryview:
        block: memoryview | None = getattr(self._of_thread, "block", None)
        if block is None or len(block) < size:
            block = self._of_thread.block = self._allocate(size)
        return block[:size]


def _mapped(size: int) -> memoryview:
    """Host memory that goes when it is freed: malloc would keep a block for each thread."""
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

    It copies them. Return whether the file is intact.
    """
    size = entry.part_bytes or max(entry.bytes, 1)
    digests = [b""] * num_parts(entry.bytes, size)

    def read_part(part: int) -> None:
        begin, stop = part * size, min((part + 1) * size, entry.bytes)
        buffer = _mapped(min(parts.PART_BYTES, stop - begin))
        digest = hashlib.sha256()
        for first in range(begin, max(stop, begin + 1), parts.PART_BYTES):
            data = buffer[: stop - first]
            store.read_into(key, start + first, data)
            digest.update(data)
            place(first, data)
        digests[part] = digest.digest()

    tasks = [partial(read_part, part) for part in range(len(digests))]
    run_all(tasks, num_threads or store.num_threads)
    return checksum_of(digests) == entry.sha256
