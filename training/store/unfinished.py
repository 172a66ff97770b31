"""Files that are being written: next to their target, and locked until they take its place.

A process that is killed leaves them behind. The system then releases their locks, which tells them
from those of a writer at work without comparing clocks.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from training.store.protocol import StoreError

_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.part")
_ATTEMPTS = 5
# A call with megabytes has the kernel look for as much memory in one piece, which cost 3 to 8 times
# the CPU time (Linux 6.18, ext4).
_WRITE_BYTES = 256 * 1024


class UnfinishedFile:
    """A new file that takes the place of `target` once complete; else its context deletes it."""

    def __init__(self, target: Path) -> None:
        self._target = target
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                self.path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
                self.file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
                try:
                    fcntl.flock(self.file, fcntl.LOCK_EX)
                except OSError:  # the file system has no locks
                    self.discard()
                    raise
                if os.fstat(self.file).st_nlink:
                    return
                self._close()  # swept before it was locked
        raise StoreError(f"{self.path} was deleted as soon as it was made, {_ATTEMPTS} times")

    def __enter__(self) -> "UnfinishedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def place(self) -> Path:
        """Let it take the place of its target."""
        with writing(self._target):
            self.path.replace(self._target)
        self._close()
        return self._target

    def discard(self) -> None:
        """Delete it; no-op once it has taken the place of its target."""
        if self.file >= 0:
            self._close()
            self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        # A closed descriptor may be reused for another file: a late write must not find it.
        file, self.file = self.file, -1
        os.close(file)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or replace it, so that nobody ever reads a part of it."""
    with writing(path), UnfinishedFile(path) as unfinished:
        unfinished.path.write_bytes(data)
        unfinished.place()


def sweep(folder: Path) -> None:
    """Delete the unfinished files below `folder` whose writers have died."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if _NAME.fullmatch(name):
                # It is being written or was finished meanwhile, or cannot be deleted.
                with suppress(OSError):
                    _delete_unlocked(Path(parent) / name)


def write_at(file: int, data: memoryview, start: int) -> None:
    """Write all of `data` from the offset `start` on; other threads may write elsewhere."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done : done + _WRITE_BYTES], start + done)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into a StoreError, as for a 500 from S3."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def _delete_unlocked(path: Path) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(file)
