"""Which files of a local dataset have been verified on this machine, so that each is hashed once.

A file counts as verified while its size, inode and change time are as they were then; another
machine verifies it again. The record lies beside the files and is only ever appended to.
"""

import contextlib
import hashlib
import json
import platform
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from training.store.reads import AppendedLines

RECORD = ".verified.jsonl"
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
        line = json.dumps([self._machine, name, identity])
        with self._lock:
            self._known[name] = identity
            # Where the folder cannot be written to, every process verifies for itself.
            with contextlib.suppress(OSError), (self._folder / RECORD).open("a") as record:
                # A line break first: a writer that was killed may have left half a line.
                record.write(f"\n{line}\n")

    def _identity(self, entry: Entry) -> list[Any] | None:
        """What changes when the file does; None if it is missing or has another size."""
        path = self._folder / entry["name"]
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        if not path.is_file() or stat.st_size != entry["bytes"]:
            return None
        return [entry["sha256"], stat.st_size, stat.st_ino, stat.st_ctime_ns]

    def _read_more(self) -> None:
        """Read what was appended since; others' and damaged lines do not count."""
        for line in self._record.new():
            with contextlib.suppress(ValueError, TypeError):
                machine, name, identity = json.loads(line)
                if machine == self._machine:
                    self._known[name] = identity


def _machine() -> str:
    """A name that no two machines share, as far as they can be told apart."""
    name = platform.node()
    with contextlib.suppress(OSError):
        name += f" {_MACHINE_ID.read_text().strip()}"
    return name
