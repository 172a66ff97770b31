"""Where a workload puts a dataset's files as it finishes them: a folder here, or a store.

Imports no torch: each process that packs has one.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from training.errors import UserError
from training.sources import UNFINISHED

# Below it an unfinished dataset keeps what is known of its finished files.
RECORDS = ".packed/"
_WORKING = ".working"
_LOCK = "lock"


class Output(Protocol):
    """A new dataset. Names are relative, with slashes; other processes can be sent one.

    A named file is complete: a writer that is killed leaves nothing under its name.
    """

    @property
    def where(self) -> str:
        """The folder or URI, for messages."""

    def working_folder(self) -> AbstractContextManager[Path]:
        """An empty local folder for what is unfinished, which no other import uses meanwhile."""

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every file that is there."""

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""

    def place(self, name: str, path: Path) -> None:
        """Move a finished file of the working folder to its place."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, as far as they are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedFiles:
    """What the manifest says of a dataset whose files are in their places."""

    meta: Mapping[str, Any]
    files: Sequence[Mapping[str, Any]]  # name, bytes, sha256


def clean_up(output: Output) -> None:
    """Delete what only an unfinished dataset needs; the sign that it is unfinished goes last."""
    output.delete([name for name in output.sizes() if name.startswith(RECORDS)])
    output.delete([UNFINISHED])


class FolderOutput:
    """A dataset that is made in a local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        return str(self._folder)

    def working_folder(self) -> AbstractContextManager[Path]:
        return locked_folder(self._folder / _WORKING)

    def sizes(self) -> Mapping[str, int]:
        paths = [path for path in self._folder.rglob("*") if path.is_file()]
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in paths}

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        return path.read_bytes() if path.is_file() else None

    def write(self, name: str, content: bytes) -> None:
        part = self._folder / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        self.place(name, part)

    def place(self, name: str, path: Path) -> None:
        # Else a machine that fails could have the name without the bytes.
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.replace(self._folder / name)

    def delete(self, names: Iterable[str]) -> None:
        for path in [self._folder / name for name in names]:
            path.unlink(missing_ok=True)
            if path.parent != self._folder and not any(path.parent.iterdir()):
                path.parent.rmdir()


@contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """A new empty folder, deleted at the end; UserError while another process has it.

    What one that was killed has left in it is deleted at the beginning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another import is at work in {folder.parent}; wait for its end, or stop it"
            ) from error
        for path in folder.iterdir():
            if path.name != _LOCK:
                path.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
