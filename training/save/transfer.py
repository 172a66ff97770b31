"""Tensors' files to and from a store in parallel parts, each hashed by the thread that moves it.

Memory: one part of PART_BYTES per thread.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from training.record.checkpoint_entry import FileEntry
from training.save.memory import allocate, view_of
from training.save.state import Contents, HostCopyFile
from training.store import parts
from training.store.parts import TransferProgress, checksum_of, num_parts, run_all
from training.store.protocol import SharedUpload, Store, Upload

# Fewer and larger requests cost less CPU (benchmarks/LOG.md), if each of 16 connections has two.
_SHARED_PART_BYTES = 32 * 1024 * 1024
_SHARED_PARTS = 32


def part_bytes_of(size: int, *, is_shared: bool = False) -> int:
    """Bytes per part of a file of `size` bytes, which needs no buffers if memory is shared."""
    smallest = parts.part_bytes_of(size)
    if not is_shared:
        return smallest
    count = num_parts(size, parts.PART_BYTES) // _SHARED_PARTS
    return max(smallest, parts.PART_BYTES * min(_SHARED_PART_BYTES // parts.PART_BYTES, count))


def lies_in_shared_memory(file: Contents) -> TypeGuard[HostCopyFile]:
    """Whether another process can read the file."""
    return isinstance(file, HostCopyFile) and file.memory >= 0


def send(
    store: Store,
    prefix: str,
    files: Sequence[Contents],
    device: torch.device,
    progress: TransferProgress,
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
        progress: TransferProgress,
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
        buffer = allocate(min(parts.PART_BYTES, stop - start), torch.device("cpu"))
        digest = hashlib.sha256()
        for first in range(start, max(stop, start + 1), parts.PART_BYTES):
            block = buffer[: stop - first]
            data = view_of(block)
            store.read_into(key, first, data)
            digest.update(data)
            place(first, block)
        digests[part] = digest.digest()

    run_all([partial(read_part, part) for part in range(len(digests))], store.num_threads)
    return checksum_of(digests) == entry.sha256
