"""Files to and from a store in parallel parts, each hashed by the thread that moves it.

The checksum of a file of one part is its SHA-256; of several parts, the SHA-256 of their
concatenated digests: S3's composite checksum, so that S3 verifies on arrival what a reader verifies
later. Memory: one part per thread.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from training.checkpoint.memory import allocate, view_of
from training.checkpoint.state import Contents
from training.record.checkpoint_entry import FileEntry
from training.store.protocol import Store, Upload

# With 16 threads half of the 256 MiB that streaming may take; 10,000 parts in S3 hold 80 GiB.
PART_BYTES = 8 * 1024 * 1024
_MAX_PARTS = 10_000


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


def part_bytes_of(size: int) -> int:
    """Bytes per part of a file of `size` bytes."""
    parts = -(-size // PART_BYTES)
    return PART_BYTES * max(1, -(-parts // _MAX_PARTS))


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
    sizes = [part_bytes_of(file.size) for file in files]
    uploads: list[Upload] = []
    try:
        for file, size in zip(files, sizes, strict=True):
            uploads.append(store.upload(prefix + file.name, file.size, size, progress.stop))
        digests = _send_parts(store, files, sizes, uploads, device, progress, beside)
        run_all([upload.finish for upload in uploads], store.num_threads, progress.stop)
    except BaseException:
        for upload in uploads:
            upload.abort()
        raise
    return tuple(
        FileEntry(name=file.name, bytes=file.size, sha256=checksum_of(own), part_bytes=size)
        for file, size, own in zip(files, sizes, digests, strict=True)
    )


def _send_parts(
    store: Store,
    files: Sequence[Contents],
    sizes: Sequence[int],
    uploads: Sequence[Upload],
    device: torch.device,
    progress: Progress,
    beside: Sequence[Callable[[], None]],
) -> list[list[bytes]]:
    digests = [[b""] * num_parts(file.size, size) for file, size in zip(files, sizes, strict=True)]
    of_thread = threading.local()

    def buffer(size: int) -> Tensor:
        if getattr(of_thread, "block", None) is None or len(of_thread.block) < size:
            of_thread.block = allocate(size, device)
        block: Tensor = of_thread.block
        return block[:size]

    def send_part(number: int, part: int) -> None:
        file, size = files[number], sizes[number]
        start, stop = part * size, min((part + 1) * size, file.size)
        data = file.read(start, stop, buffer)
        digest = hashlib.sha256(data).digest()
        uploads[number].put(part, start, data, digest)
        digests[number][part] = digest
        progress.add(stop - start)

    parts = [
        partial(send_part, number, part)
        for number in range(len(files))
        for part in range(len(digests[number]))
    ]
    run_all([*beside, *parts], store.num_threads, progress.stop)
    return digests


def receive(store: Store, key: str, entry: FileEntry, place: Callable[[int, Tensor], None]) -> bool:
    """Read a file in parts, passing each to `place(start, bytes)`; return whether it is intact."""
    size = entry.part_bytes or max(entry.bytes, 1)
    digests = [b""] * num_parts(entry.bytes, size)

    def read_part(part: int) -> None:
        start, stop = part * size, min((part + 1) * size, entry.bytes)
        # Not torch.empty: its allocator would keep a block per thread to the end of the process.
        block = allocate(stop - start, torch.device("cpu"))
        data = view_of(block)
        store.read_into(key, start, data)
        digests[part] = hashlib.sha256(data).digest()
        place(start, block)

    run_all([partial(read_part, part) for part in range(len(digests))], store.num_threads)
    return checksum_of(digests) == entry.sha256


def num_parts(size: int, part_bytes: int) -> int:
    """Number of parts; at least one, as an empty file is one empty part."""
    return max(1, -(-size // part_bytes))


def run_all(
    tasks: Sequence[Callable[[], None]], num_threads: int, stop: threading.Event | None = None
) -> None:
    """Run tasks in threads; raise the first error, or CancelledError once `stop` is set.

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
