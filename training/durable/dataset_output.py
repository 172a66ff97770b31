"""Where a workload puts a dataset's files as it finishes them: a local folder or a store.

Imports no torch, since every packing process imports this module.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from contract.errors import UserError
from contract.keys import PACKED, UNFINISHED

_WORKING = ".working"
_LOCK = "lock"


class Output(Protocol):
    """A new dataset, which can be sent to other processes. Names are relative, with slashes.

    A named file is complete: a writer that is killed leaves nothing under its name.
    """

    @property
    def where(self) -> str:
        """The folder or URI, for messages."""

    def working_folder(self) -> AbstractContextManager[Path]:
        """Return an empty local folder for unfinished files, locked against other imports."""

    def sizes(self) -> Mapping[str, int]:
        """Return the bytes of every file that exists, by name."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if it does not exist."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""

    def place(self, name: str, path: Path) -> None:
        """Move a finished file from the working folder to its place."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete these files, ignoring any that do not exist."""

    def clean_up(self) -> None:
        """Delete what only an unfinished dataset needs, and last the file that marks it as such."""
        self.delete([name for name in self.sizes() if name.startswith(PACKED)])
        self.delete([UNFINISHED])


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedFiles:
    """The manifest's content for a dataset whose files are in place."""

    meta: Mapping[str, Any]
    files: Sequence[Mapping[str, Any]]  # name, bytes, sha256, perhaps xxh128


class FolderOutput(Output):
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
        # Otherwise a machine that fails could keep the name without the bytes.
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.replace(self._folder / name)

    def delete(self, names: Iterable[str]) -> None:
        for path in [self._folder / name for name in names]:
            path.unlink(missing_ok=True)
            if path.parent != self._folder:
                with suppress(OSError):  # a folder that is not empty, as that of the dataset
                    os.removedirs(path.parent)


@contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder and delete it at the end; UserError while another process has it.

    What a killed process has left in it is deleted first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another import is running in {folder.parent}; wait for it to end, or stop it"
            ) from error
        for path in folder.iterdir():
            if path.name != _LOCK:
                path.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
