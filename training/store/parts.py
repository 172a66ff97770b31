"""Files in parts, moved by a few threads: sizes, checksums, progress. Imports no torch.

The checksum of a file of one part is its SHA-256; of several parts, the SHA-256 of their
concatenated digests: S3's composite checksum, so that S3 verifies on arrival what a reader verifies
later.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# With 16 threads half of the 256 MiB that streaming may take; 10,000 parts in S3 hold 80 GiB.
PART_BYTES = 8 * 1024 * 1024
MAX_PARTS = 10_000


class CancelledError(RuntimeError):
    """The transfer was stopped by its caller."""


@dataclass(slots=True)
class TransferProgress:
    """The progress of a transfer; any thread may read it or stop the transfer."""

    done_bytes: int = 0
    total_bytes: int = 0  # 0: not known
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int) -> None:
        """Count bytes that have arrived."""
        with self.lock:
            self.done_bytes += size


def part_bytes_of(size: int) -> int:
    """Bytes per part of a file of `size` bytes that is read into buffers."""
    return PART_BYTES * max(1, -(-num_parts(size, PART_BYTES) // MAX_PARTS))


def checksum_of(digests: Sequence[bytes]) -> str:
    """The checksum of a file whose parts have these digests."""
    if len(digests) == 1:
        return digests[0].hex()
    return hashlib.sha256(b"".join(digests)).hexdigest()


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
