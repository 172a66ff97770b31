"""Records the files of a local dataset that this machine has verified or a trainer reads next.

A file counts as verified, and is not hashed again, while its size, inode and change time stay the
same; another machine verifies it again. Both records are next to the files, and only ever grow.
"""

import contextlib
import hashlib
import json
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

RECORD = ".verified.jsonl"
# What a trainer will read next from a folder that a sync is filling: lists of names, the newest
# list first. It affects time, never numbers.
READS = ".reads.jsonl"
_MACHINE_ID = Path("/etc/machine-id")
_CHUNK = 4 * 1024 * 1024

# name, bytes and sha256 of a file, as in the manifest
Entry: TypeAlias = Mapping[str, Any]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class VerifiedFiles:
    """The record of one folder. Another process may append while this one reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machine = _machine()
        self._known: dict[str, Any] = {}
        self._record = AppendedLines(folder / RECORD)
        self._lock = threading.Lock()

    def holds(self, entry: Entry) -> bool:
        """Whether the file has been verified here and has not been touched since."""
        identity = self._identity(entry)
        if identity is None:
            return False
        with self._lock:
            if self._known.get(entry["name"]) != identity:
                self._read_more()
            return bool(self._known.get(entry["name"]) == identity)

    def verify(self, entry: Entry, *, again: bool = False) -> bool:
        """Whether the file has the manifest's size and checksum; `again` hashes it in any case."""
        if not again and self.holds(entry):
            return True
        path, before = self._folder / entry["name"], self._identity(entry)
        if before is None or sha256_of(path) != entry["sha256"]:
            return False
        self._add(entry["name"], before)
        return True

    def add(self, entry: Entry) -> None:
        """Record a file that its writer has just verified."""
        self._add(entry["name"], self._identity(entry))

    def _add(self, name: str, identity: Any) -> None:
        with self._lock:
            self._known[name] = identity
            # Where the folder cannot be written to, every process verifies for itself.
            self._record.append([self._machine, name, identity])

    def _identity(self, entry: Entry) -> list[Any] | None:
        """Return what changes when the file does; None if it is missing or has another size."""
        path = self._folder / entry["name"]
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        if not path.is_file() or stat.st_size != entry["bytes"]:
            return None
        return [entry["sha256"], stat.st_size, stat.st_ino, stat.st_ctime_ns]

    def _read_more(self) -> None:
        """Read what was appended since; lines of other machines, and damaged ones, do not count."""
        for line in self._record.new():
            with contextlib.suppress(ValueError, TypeError):
                machine, name, identity = json.loads(line)
                if machine == self._machine:
                    self._known[name] = identity


def _machine() -> str:
    """Return a name that no two machines share, as far as they can be told apart."""
    name = platform.node()
    with contextlib.suppress(OSError):
        name += f" {_MACHINE_ID.read_text().strip()}"
    return name


def announce(folder: Path, names: Iterable[str]) -> None:
    """Ask the folder's sync for these files, in this order, before all others."""
    # If the folder cannot be written to, the files come all the same, only later.
    AppendedLines(folder / READS).append(list(names))


class AppendedLines:
    """The lines of a file that other processes append to, each returned once and complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def append(self, record: Any) -> None:
        """Append a record as JSON; no-op where the file cannot be written to."""
        with contextlib.suppress(OSError), self._path.open("a") as file:
            # A line break first: a writer that was killed may have left half a line.
            file.write(f"\n{json.dumps(record)}\n")

    def new(self) -> Iterator[str]:
        """Yield the lines appended since; none if the file is missing or another user's."""
        try:
            if self._path.stat().st_size == self._position:
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in filter(None, whole.split(b"\n")):
            yield line.decode(errors="replace")
