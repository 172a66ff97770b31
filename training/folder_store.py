"""A store in a folder. A key is only ever written whole: readers never see half a file."""

import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import UserError
from training.storage import PreconditionFailedError, Stored, StoreError


class FolderStore:
    """A folder. Writes are: a file beside the target, fsync, rename, fsync of the folder."""

    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise UserError(f"{root} is a file; give a folder")
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    def get(self, key: str) -> Stored | None:
        try:
            data = (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        return Stored(data=data, etag=hashlib.sha256(data).hexdigest())

    def put(self, key: str, data: bytes) -> None:
        with self._replacing(key) as part, part.open("wb") as stream:
            stream.write(data)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        self._root.mkdir(parents=True, exist_ok=True)
        # flock belongs to the open file, so it keeps threads of one process apart, unlike lockf.
        with (self._root / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self.get(key)
            if (found.etag if found else None) != etag:
                raise PreconditionFailedError(f"{self.uri}/{key} is not what it was")
            self.put(key, data)
        return hashlib.sha256(data).hexdigest()

    def get_file(self, key: str, path: Path) -> None:
        shutil.copyfile(self._root / key, path)

    def put_file(self, key: str, path: Path) -> None:
        with self._replacing(key) as part:
            shutil.copyfile(path, part)

    def upload(self, key: str, size: int, part_bytes: int, stop: threading.Event) -> "_FileUpload":
        return _FileUpload(self._root / key, size)

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        with (self._root / key).open("rb", buffering=0) as stream:
            stream.seek(start)
            done = 0
            while done < len(data):
                count = stream.readinto(data[done:])
                if not count:
                    raise StoreError(f"{self.uri}/{key} ends before byte {start + len(data)}")
                done += count

    def sizes(self, prefix: str) -> dict[str, int]:
        folder = self._root / prefix
        files = (file for file in folder.rglob("*") if not file.name.startswith("."))
        return {
            file.relative_to(self._root).as_posix(): file.stat().st_size
            for file in sorted(files)
            if file.is_file()
        }

    def delete_below(self, prefix: str) -> None:
        if (self._root / prefix).is_dir():
            shutil.rmtree(self._root / prefix)

    @contextmanager
    def _replacing(self, key: str) -> Iterator[Path]:
        target = self._root / key
        part = _beside(target)
        try:
            yield part
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        _sync_folder(target.parent)


class _FileUpload:
    """A file beside its target, written anywhere in any order."""

    def __init__(self, target: Path, size: int) -> None:
        self._target = target
        self._part = _beside(target)
        self._file = os.open(self._part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)

    def put(self, number: int, start: int, data: memoryview, sha256: bytes) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], start + done)
        if hasattr(os, "posix_fadvise"):
            # Linux begins to write the pages back, so that fsync finds little left to wait for.
            os.posix_fadvise(self._file, start, len(data), os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        self._part.replace(self._target)
        _sync_folder(self._target.parent)

    def abort(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._part.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
