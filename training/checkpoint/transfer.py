"""Files to and from a store in parallel parts, each hashed by the thread that moves it.

The checksum of a file of one part is its SHA-256; of several parts, the SHA-256 of their
concatenated digests: S3's composite checksum, so that S3 verifies on arrival what a reader verifies
later. Memory: one part of PART_BYTES per thread.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from training.checkpoint.memory import allocate, view_of
from training.checkpoint.state import Contents, HostCopyFile
from training.record.checkpoint_entry import FileEntry
from training.store.protocol import SharedUpload, Store, Upload

# With 16 threads half of the 256 MiB that streaming may take; 10,000 parts in S3 hold 80 GiB.
PART_BYTES = 8 * 1024 * 1024
_MAX_PARTS = 10_000
# Fewer and larger requests cost less CPU (benchmarks/LOG.md), if each of 16 connections has two.
_SHARED_PART_BYTES = 32 * 1024 * 1024
_SHARED_PARTS = 32


class CancelledError(RuntimeError):
    """The transfer was stopped by its caller."""


@dataclass(slots=True)
class Progress:
    """The progress of a transfer; any thread may read it or stop the transfer."""

    done_bytes: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int) -> None:
        """Count bytes that have arrived."""
        with self.lock:
            self.done_bytes += size


def part_bytes_of(size: int, *, is_shared: bool = False) -> int:
    """Bytes per part of a file of `size` bytes, which needs no buffers if memory is shared."""
    parts = -(-size // PART_BYTES)
    larger = min(_SHARED_PART_BYTES // PART_BYTES, parts // _SHARED_PARTS) if is_shared else 1
    return PART_BYTES * max(1, larger, -(-parts // _MAX_PARTS))


def lies_in_shared_memory(file: Contents) -> TypeGuard[HostCopyFile]:
    """Whether another process can read the file."""
    return isinstance(file, HostCopyFile) and file.memory >= 0


def checksum_of(digests: Sequence[bytes]) -> str:
    """The checksum of a file whose parts have these digests."""
    if len(digests) == 1:
        return digests[0].hex()
    return hashlib.sha256(b"".join(digests)).hexdigest()


def send(
    store: Store,
    prefix: str,
    files: Sequence[Contents],
    device: torch.device,
    progress: Progress,
    beside: Sequence[Callable[[], None]] = (),
) -> tuple[FileEntry, ...]:
    """Upload the files below `prefix`; if that fails or is stopped, all uploads are aborted.

    The tasks `beside` run meanwhile; if one fails, everything fails.
    """
    sizes = [part_bytes_of(file.size, is_shared=lies_in_shared_memory(file)) for file in files]
    uploads: list[Upload] = []
    try:
        for file, size in zip(files, sizes, strict=True):
            uploads.append(store.upload(prefix + file.name, file.size, size, progress.stop))
        sending = _Sending(files, sizes, uploads, device, progress)
        tasks = [*beside, *sending.tasks()]
        run_all(tasks, store.num_threads, progress.stop, sending.fail)
        run_all([upload.finish for upload in uploads], store.num_threads, progress.stop)
    except BaseException:
        for upload in uploads:
            upload.abort()
        raise
    return tuple(
        FileEntry(name=file.name, bytes=file.size, sha256=checksum_of(own), part_bytes=size)
        for file, size, own in zip(files, sizes, sending.digests, strict=True)
    )


class _Sending:
    """The parts of some files on their way to the store, and their digests."""

    def __init__(
        self,
        files: Sequence[Contents],
        sizes: Sequence[int],
        uploads: Sequence[Upload],
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.digests = [
            [b""] * num_parts(file.size, size) for file, size in zip(files, sizes, strict=True)
        ]
        self._files, self._sizes, self._uploads = files, sizes, uploads
        self._device = device
        self._progress = progress
        self._of_thread = threading.local()
        self._has_failed = False

    def tasks(self) -> Iterator[Callable[[], None]]:
        """One task for each part, or for a whole file whose parts another process sends."""
        for number, (file, upload) in enumerate(zip(self._files, self._uploads, strict=True)):
            if (
                lies_in_shared_memory(file)
                and isinstance(upload, SharedUpload)
                and upload.is_ready()
            ):
                yield partial(self._put_shared, number, file, upload)
            else:
                parts = range(len(self.digests[number]))
                yield from (partial(self._put, number, part) for part in parts)

    def fail(self) -> None:
        """Withdraw what another process still sends: a task has failed."""
        self._has_failed = True

    def _put(self, number: int, part: int) -> None:
        file, size = self._files[number], self._sizes[number]
        start, stop = part * size, min((part + 1) * size, file.size)
        data = file.read(start, stop, self._buffer)
        digest = hashlib.sha256(data).digest()
        self._uploads[number].put(part, start, data, digest)
        self._arrived(number, part, digest)

    def _put_shared(self, number: int, file: HostCopyFile, upload: SharedUpload) -> None:
        for part, digest in upload.put_shared(
            file.memory, file.size, self._sizes[number], self._must_stop
        ):
            self._arrived(number, part, digest)

    def _must_stop(self) -> bool:
        return self._has_failed or self._progress.stop.is_set()

    def _arrived(self, number: int, part: int, digest: bytes) -> None:
        self.digests[number][part] = digest
        size = self._sizes[number]
        self._progress.add(min(size, self._files[number].size - part * size))

    def _buffer(self, size: int) -> Tensor:
        block: Tensor | None = getattr(self._of_thread, "block", None)
        if block is None or len(block) < size:
            block = self._of_thread.block = allocate(size, self._device)
        return block[:size]


def receive(store: Store, key: str, entry: FileEntry, place: Callable[[int, Tensor], None]) -> bool:
    """Read a file in parts, passing its bytes to `place(start, bytes)`, which copies them.

    Return whether it is intact.
    """
    size = entry.part_bytes or max(entry.bytes, 1)
    digests = [b""] * num_parts(entry.bytes, size)

    def read_part(part: int) -> None:
        start, stop = part * size, min((part + 1) * size, entry.bytes)
        # Not torch.empty: its allocator would keep a block per thread to the end of the process.
        buffer = allocate(min(PART_BYTES, stop - start), torch.device("cpu"))
        digest = hashlib.sha256()
        for first in range(start, max(stop, start + 1), PART_BYTES):
            block = buffer[: stop - first]
            data = view_of(block)
            store.read_into(key, first, data)
            digest.update(data)
            place(first, block)
        digests[part] = digest.digest()

    run_all([partial(read_part, part) for part in range(len(digests))], store.num_threads)
    return checksum_of(digests) == entry.sha256


def num_parts(size: int, part_bytes: int) -> int:
    """Number of parts; at least one, as an empty file is one empty part."""
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
