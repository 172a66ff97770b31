"""Datasets between a store and a local folder: upload, wait for, sync.

    python -m training data sync --dataset-uri s3://bucket/trajectory --out /data/dataset

Also reads files that users bring from a store, and writes a dataset to one while it is made; other
processes are sent the URI and open the store themselves. Imports no torch: it runs at boot.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.keys import MANIFEST, UNFINISHED
from contract.program import WORKLOAD as PROGRAM
from training.durable.dataset_output import FinishedFiles, FolderOutput, Output, locked_folder
from training.durable.source_layout import places_of
from training.durable.store.fetching import fetch_missing
from training.durable.store.folder import UnfinishedFile, open_store, write_whole
from training.durable.store.local_dataset import (
    ARRIVING,
    FileProgress,
    LocalDataset,
    for_each_file,
    is_programs_own,
    list_files,
    manifest_of,
    no_progress,
    parse_manifest,
    syncing,
)
from training.durable.store.protocol import Store
from training.durable.store.verified import READS, Entry, VerifiedFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class _SyncResult:
    """Files and bytes of a synced or uploaded dataset, those transferred, and the time."""

    files: int
    bytes: int
    fetched_files: int
    fetched_bytes: int
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        """Speed over the entire dataset, including files that were only verified."""
        return self.bytes / 1e6 / max(self.seconds, 1e-9)


class StoredDataset:
    """A dataset in a store: s3://bucket/prefix, or a folder."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @staticmethod
    def complete(output: Output, workload: str, made: FinishedFiles) -> None:
        """Write the manifest of a dataset whose files are in place."""
        name = output.where.rpartition("/")[2]
        output.write(MANIFEST, manifest_of(name, workload, made.meta, made.files))
        if isinstance(output, FolderOutput):
            verified = VerifiedFiles(Path(output.where))
            for entry in made.files:
                verified.add(entry)

    @property
    def manifest(self) -> dict[str, Any] | None:
        """Its manifest; None if it has none, as while it is uploaded."""
        found = self._store.get(MANIFEST)
        return parse_manifest(found.data, self._store.uri) if found else None

    def require(self) -> bytes:
        """Return the content of its manifest; UserError if there is none."""
        found = self._store.get(MANIFEST)
        if found is None:
            raise UserError(
                f"{self._store.uri} has no {MANIFEST}; upload a dataset with "
                f"`python -m training data upload DIR --dataset-uri {self._store.uri}`"
            )
        return found.data

    def wait(self, wait_seconds: float, missing: Callable[[], None]) -> bool:
        """Wait for a manifest; return whether it came. `missing` is called if it must come yet."""
        deadline = time.monotonic() + wait_seconds
        is_reported = False
        while self._store.get(MANIFEST) is None:
            if not is_reported:
                is_reported = True
                missing()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(5.0, max(0.05, wait_seconds / 100), left))
        return True

    def upload(self, folder: Path, progress: FileProgress) -> _SyncResult:
        """Verify and upload a folder, the manifest last.

        A program's folder is its user's: the manifest lists all its files as they are now, and is
        written to the store only. A file is skipped if the store has it, and has the same checksum
        for it in its manifest.
        """
        began, store = time.monotonic(), self._store
        if (folder / UNFINISHED).is_file():
            raise UserError(
                f"{folder} has an unfinished dataset; finish it with the command that began it"
            )
        if is_programs_own(folder):
            manifest = list_files(folder, PROGRAM, {})
        else:
            LocalDataset.open(folder, again=True)
            manifest = (folder / MANIFEST).read_bytes()
        files = parse_manifest(manifest, str(folder))["files"]
        before = self.manifest
        known = before["files"] if before else []
        same = {(entry["name"], entry["sha256"]) for entry in known}
        there = store.sizes("")
        store.sweep("")

        def send(entry: Mapping[str, Any]) -> bool:
            name = entry["name"]
            if (name, entry["sha256"]) in same and there.get(name) == entry["bytes"]:
                return False
            store.put_file(name, folder / name)
            return True

        fetched = for_each_file(files, send, progress)
        store.put(MANIFEST, manifest)
        return _synced(files, fetched, began)

    def sync(
        self, out: Path, progress: FileProgress, begun: Callable[[], None] = lambda: None
    ) -> _SyncResult:
        """Fetch missing and damaged files into `out`, verify all, and write the manifest last.

        Once `begun` is called, whoever opens the folder can use each file as soon as it is
        verified, and can ask for files to be fetched first (`LocalDataset.expect`).
        """
        began, store, manifest = time.monotonic(), self._store, self.require()
        files = parse_manifest(manifest, store.uri)["files"]
        out.mkdir(parents=True, exist_ok=True)
        if out.resolve() == Path(store.uri).resolve():
            LocalDataset.open(out, again=True)
            return _synced(files, [], began)
        if not (out / MANIFEST).exists() and not (out / ARRIVING).exists():
            for path in (out / each["name"] for each in files if (out / each["name"]).is_file()):
                raise UserError(f"{path} was not synced, and would be replaced; use a new folder")
        # Also before the lock: whoever sees the lock held finds this manifest, not an older one.
        write_whole(out / ARRIVING, manifest)
        with syncing(out):
            UnfinishedFile.sweep(out)
            write_whole(out / ARRIVING, manifest)
            begun()
            fetched = fetch_missing(store, files, out, progress)
            (out / READS).unlink(missing_ok=True)
            (out / ARRIVING).replace(out / MANIFEST)
        return _synced(files, fetched, began)

    def fetched(self, scratch: Path, progress: FileProgress = no_progress) -> LocalDataset:
        """Open it here; from S3 it is synced into `scratch` first."""
        folder = Path(self._store.uri)
        if self._store.uri.startswith("s3://"):
            folder = scratch / "dataset"
            self.sync(folder, progress)
        return LocalDataset.open(folder)


def _synced(files: Sequence[Entry], fetched: Sequence[Entry], began: float) -> _SyncResult:
    return _SyncResult(
        files=len(files),
        bytes=sum(entry["bytes"] for entry in files),
        fetched_files=len(fetched),
        fetched_bytes=sum(entry["bytes"] for entry in fetched),
        seconds=time.monotonic() - began,
    )


@cache
def _store(uri: str) -> Store:
    """Open a store once per process: it keeps its connections."""
    return open_store(uri)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredFile:
    """One file that a user brings, in a store."""

    uri: str
    name: str
    num_bytes: int
    label: str | None
    split: str | None
    doubt: str

    def read(self) -> bytes:
        """Return its content; the store has retried what failed."""
        found = _store(self.uri).get(self.name)
        if found is None:
            raise UserError(f"{self.uri}/{self.name} was deleted during the import; restore it")
        return found.data


def stored_source(uri: str) -> list[_StoredFile]:
    """List the files below a URI, sorted by name: CLASS/FILE, perhaps below folders of splits."""
    sizes = _store(uri).sizes("")
    found = [
        _StoredFile(
            uri=uri, name=name, num_bytes=sizes[name], label=label, split=split, doubt=doubt
        )
        for name, label, split, doubt in places_of(sorted(sizes))
    ]
    if not found:
        raise UserError(f"{uri} has no files; use a prefix that has some")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOutput(Output):
    """A dataset that is uploaded file by file; only unfinished files are on this machine."""

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
        """Upload it, and delete it here."""
        _store(self.uri).put_file(name, path)
        path.unlink()

    def delete(self, names: Iterable[str]) -> None:
        _store(self.uri).delete(names)
