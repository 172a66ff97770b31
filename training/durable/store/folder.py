"""A store in a folder, and which store a URI names. Readers never see half a file in a folder.

A file that is being written is next to its target, locked, until it takes its place. A killed
process leaves it behind, but the system releases the lock: which distinguishes it from the file of
a writer at work, without comparing clocks.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from contract.errors import UserError
from training.durable.store.protocol import (
    Patience,
    PreconditionFailedError,
    Store,
    Stored,
    StoreError,
    Upload,
    read_all,
    refuse_outside,
    refused_file,
    writing,
)
from training.durable.store.s3 import S3Store
from training.durable.store.transfer import has_fast_hash, write_at

_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.part")
_NAME_BYTES = 240
_ATTEMPTS = 5


class UnfinishedFile:
    """A new file that replaces `target` once it is complete; otherwise its context deletes it."""

    def __init__(self, target: Path) -> None:
        self._target = target
        with writing(target):
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                # Systems take 255 bytes in a name; the target's may have all of them.
                name = os.fsdecode(os.fsencode(target.name)[:_NAME_BYTES])
                self.path = target.with_name(f".{name}.{secrets.token_hex(4)}.part")
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

    @staticmethod
    def sweep(folder: Path) -> None:
        """Delete the unfinished files below `folder` whose writers have died."""
        for parent, _, names in os.walk(folder):
            for name in names:
                if _NAME.fullmatch(name):
                    path = Path(parent) / name
                    # It is being written, was just finished, or cannot be deleted.
                    with suppress(OSError), path.open("r+b") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()

    def __enter__(self) -> "UnfinishedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def place(self) -> Path:
        """Move it to its target, replacing that."""
        with writing(self._target):
            self.path.replace(self._target)
        self._close()
        return self._target

    def discard(self) -> None:
        """Delete it; no-op once it has replaced its target."""
        if self.file >= 0:
            self._close()
            self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        # A closed descriptor may be reused for another file: a late write must not find it.
        file, self.file = self.file, -1
        os.close(file)


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a file, so that no reader ever sees a part of it."""
    with writing(path), UnfinishedFile(path) as unfinished:
        unfinished.path.write_bytes(data)
        unfinished.place()


_PAGE = 4096
_LOCK_SECONDS = 30.0
# Smaller files are not worth a second file descriptor.
_DIRECT_BYTES = 1024 * 1024


class FolderStore:
    """A folder. A write is a temporary file, fsync, rename, fsync of the folder."""

    # Some hash while others write: with four, both often waited at once (benchmarks/LOG.md).
    num_threads = 8
    part_process = None

    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise UserError(f"{root} is a file; name a folder")
        self._root = root.absolute()
        self.patience = Patience()

    @property
    def uri(self) -> str:
        return str(self._root)

    def get(self, key: str) -> Stored | None:
        path = self._at(key)
        with _reading(path):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        return Stored(data=data, etag=hashlib.sha256(data).hexdigest())

    def put(self, key: str, data: bytes) -> None:
        with self._replacing(key) as path:
            path.write_bytes(data)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        with writing(self._at(key)), self._locked():
            found = self.get(key)
            if (found.etag if found else None) != etag:
                raise PreconditionFailedError(f"{self.uri}/{key} has changed")
            self.put(key, data)
        return hashlib.sha256(data).hexdigest()

    def get_file(self, key: str, path: Path) -> None:
        with _reading(self._at(key)):
            shutil.copyfile(self._at(key), path)

    def put_file(self, key: str, path: Path) -> None:
        with self._replacing(key) as copy:
            shutil.copyfile(path, copy)

    def upload(
        self, key: str, size: int, part_bytes: int, stop: threading.Event, may_be_fast: bool = False
    ) -> Upload:
        upload = _FileUpload(self._at(key), size)
        upload.is_fast = may_be_fast and has_fast_hash()
        return upload

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        with _reading(self._at(key)), self._at(key).open("rb", buffering=0) as stream:
            stream.seek(start)
            read_all(stream, data, f"{self.uri}/{key} ends before byte {start + len(data)}")

    def sizes(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with _reading(self._at(prefix)):
            for folder, _, names in os.walk(self._at(prefix), onerror=_raise_unless_missing):
                for path in (Path(folder) / name for name in names if not name.startswith(".")):
                    with suppress(FileNotFoundError):  # just deleted
                        found[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return dict(sorted(found.items()))

    def folders(self, prefix: str) -> set[str]:
        path = self._at(prefix)
        with _reading(path), suppress(FileNotFoundError), os.scandir(path) as entries:
            return {entry.name for entry in entries if entry.is_dir()}
        return set()

    def delete_below(self, prefix: str) -> None:
        with writing(self._at(prefix)):
            while self._at(prefix).is_dir():
                with suppress(FileNotFoundError):  # another process deletes it too
                    shutil.rmtree(self._at(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with writing(self._at(key)):
                self._at(key).unlink(missing_ok=True)

    def sweep(self, prefix: str) -> None:
        with writing(self._at(prefix)):
            UnfinishedFile.sweep(self._at(prefix))

    def _at(self, key: str) -> Path:
        refuse_outside(self.uri, key)
        return self._root / key

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Serialize conditional writes; fail if a suspended process holds the lock for too long."""
        self._root.mkdir(parents=True, exist_ok=True)
        path, deadline = self._root / ".lock", time.monotonic() + _LOCK_SECONDS
        # flock belongs to the open file, so it also excludes threads of one process, unlike lockf.
        with path.open("wb") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise StoreError(
                            f"{path} was locked by another process for {_LOCK_SECONDS:g} s; "
                            "end that process if it is suspended (Ctrl-Z)"
                        ) from error
                    time.sleep(0.002)
            try:
                yield
            finally:
                # Closing is not enough: a loader worker forked since then has the file open too.
                fcntl.flock(lock, fcntl.LOCK_UN)

    @contextmanager
    def _replacing(self, key: str) -> Iterator[Path]:
        target = self._at(key)
        with writing(target), UnfinishedFile(target) as unfinished:
            yield unfinished.path
            os.fsync(unfinished.file)
            unfinished.place()
            _sync_folder(target.parent)


class _FileUpload(Upload):
    """A temporary file next to its target, written at any offset in any order.

    It bypasses the page cache where the system allows: several times as fast as writing through
    it, at a tenth of the CPU work, and the dataset stays cached.
    """

    def __init__(self, target: Path, size: int) -> None:
        self._target = target
        with writing(target):
            self._unfinished = UnfinishedFile(target)
            self._direct = _open_direct(self._unfinished.path) if size >= _DIRECT_BYTES else -1
            try:
                if size and hasattr(os, "posix_fallocate"):
                    # Allocates blocks once, and finds a full disk before anything is written.
                    os.posix_fallocate(self._unfinished.file, 0, size)
            except OSError:
                self.abort()
                raise

    def put(self, number: int, start: int, data: memoryview, digest: bytes) -> None:
        done = 0
        with writing(self._target):
            if self._direct >= 0 and start % _PAGE == 0:
                done = self._put_direct(start, data[: len(data) // _PAGE * _PAGE])
            write_at(self._unfinished.file, data[done:], start + done)

    def _put_direct(self, start: int, data: memoryview) -> int:
        """Write whole pages; return how many bytes the system accepted."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._direct, data[done:], start + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # Unaligned memory or offsets are refused: the caller writes the rest through the cache.
        return done

    def finish(self) -> None:
        with writing(self._target):
            os.fsync(self._unfinished.file)
            self._close_direct()
            self._unfinished.place()
            _sync_folder(self._target.parent)

    def abort(self) -> None:
        self._close_direct()
        self._unfinished.discard()

    def _close_direct(self) -> None:
        # A closed descriptor may be reused for another file: a late write must not find it.
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        return -1  # not every system and file system supports it


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _raise_unless_missing(error: OSError) -> None:
    # os.walk would skip what it cannot list, and existing files would seem to be missing.
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError; a missing file stays FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refused_file(Path(error.filename or path), error) from error


def open_store(uri: str, near: Store | None = None) -> Store:
    """Open `s3://bucket/prefix` or a folder, which need not exist yet.

    Where many are open, `near` is one of the same bucket, whose connections the others use.
    """
    if uri.startswith("s3://"):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise UserError(f"the URI {uri!r} names no bucket; write s3://bucket/prefix")
        return S3Store(bucket, prefix.strip("/"), near if isinstance(near, S3Store) else None)
    if "://" in uri or uri.startswith("s3:") or not uri:
        raise UserError(
            f"the URI {uri!r} is neither s3://bucket/prefix nor a folder; pass one of them"
        )
    return FolderStore(Path(uri))
