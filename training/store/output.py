"""Files that users bring from a store, and a dataset that goes to one while it is made.

    python -m training data import s3://bucket/photos --workload imagenet --dataset-uri s3://...

Other processes are sent the URI and open the store themselves.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from training.dataset_output import locked_folder
from training.errors import UserError
from training.sources import places_of
from training.store.open import open_store
from training.store.protocol import Store


@cache
def _store(uri: str) -> Store:
    """One per process: connections are kept."""
    return open_store(uri)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One file that a user brings, in a store."""

    uri: str
    name: str
    num_bytes: int
    label: str | None
    split: str | None

    def read(self) -> bytes:
        """Its content; what fails was tried again by the store."""
        found = _store(self.uri).get(self.name)
        if found is None:
            raise UserError(f"{self.uri}/{self.name} has gone since the import began; restore it")
        return found.data


def stored_source(uri: str) -> list[StoredFile]:
    """The files below a URI, sorted by name: CLASS/FILE, perhaps below folders of splits."""
    sizes = _store(uri).sizes("")
    found = [
        StoredFile(uri=uri, name=name, num_bytes=sizes[name], label=label, split=split)
        for name, label, split in places_of(sorted(sizes))
    ]
    if not found:
        raise UserError(f"{uri} has no files; give a prefix that has some")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOutput:
    """A dataset that is uploaded file by file: here is only what is unfinished."""

    uri: str

    @property
    def where(self) -> str:
        return self.uri

    def working_folder(self) -> AbstractContextManager[Path]:
        _store(self.uri).sweep("")
        name = f"training-import-{hashlib.sha256(self.uri.encode()).hexdigest()[:16]}"
        return locked_folder(Path(tempfile.gettempdir()) / name)

    def sizes(self) -> Mapping[str, int]:
        return _store(self.uri).sizes("")

    def read(self, name: str) -> bytes | None:
        found = _store(self.uri).get(name)
        return found.data if found else None

    def write(self, name: str, content: bytes) -> None:
        _store(self.uri).put(name, content)

    def place(self, name: str, path: Path) -> None:
        """Upload and delete it."""
        _store(self.uri).put_file(name, path)
        path.unlink()

    def delete(self, names: Iterable[str]) -> None:
        _store(self.uri).delete(names)
