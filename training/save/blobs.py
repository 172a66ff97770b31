"""Which blobs stay: those that a snapshot of the head needs. The others are deleted.

Why nobody deletes what another needs, however late it wakes:
1. A blob's name is never used twice, so a deletion that arrives late hits what it was meant for.
2. A writer deletes a blob only after a write of the head by itself, if no snapshot which that head
   names needs it; from then on it uses the blob no more.
3. A successor uses only blobs of snapshots that the head named when it took over. That head is the
   one of 2, or a later one by the same writer, whose snapshots do not use the blob either.
4. A take-over sweeps blobs of earlier generations only, whose writers the store now refuses.
   What such a writer still sends, the next take-over sweeps, or the end of the run.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import partial

from contract.keys import BLOB_NAME, BLOBS, blob_key
from training.record.lease import Lease
from training.record.newest_valid import DamagedCheckpointError, read_twice
from training.save.capture import Known, known_after
from training.save.listing import FileState
from training.save.manifest import Content, FolderManifest
from training.save.restore import read_manifest
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)


class Blobs:
    """The blobs of a run, as the holder of its lease sees them; used by one thread at a time."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self.known = Known()  # what a next snapshot need not send
        self.newest: FolderManifest | None = None  # the last that was committed or restored
        self._store = store
        self._lease = lease
        self._manifests: dict[str, FolderManifest] = {}  # by name: all that the head may name
        self._there: set[str] = set()  # blobs that may exist

    def begin_with(self, manifest: FolderManifest, files: Mapping[FileState, Content]) -> None:
        """The folder is as this snapshot has it: it was committed, or restored."""
        self.newest, self.known = manifest, known_after(manifest, files)

    def add(self, name: str, manifest: FolderManifest) -> None:
        """Know a snapshot before its publication is tried: that may be done and unanswered."""
        self._manifests[name] = manifest
        self._there |= manifest.blobs.keys()

    def sweep(self) -> None:
        """Delete the blobs of earlier generations that no snapshot of the head needs."""
        generation = self._lease.head.generation
        try:
            self._read_unknown()
            names = [key.removeprefix(BLOBS) for key in self._store.sizes(BLOBS)]
        except StoreError as error:
            _log.warning(f"[sweep] {error}; the next take-over sweeps")
            return
        matches = filter(None, map(BLOB_NAME.fullmatch, names))
        self._there |= {match[0] for match in matches if int(match["generation"]) < generation}
        self.delete_unneeded()

    def delete_unneeded(self) -> None:
        """Delete what no snapshot of the head needs; nothing waits for it."""
        named = [entry.name for entry in self._lease.head.checkpoints]
        if unknown := [name for name in named if name not in self._manifests]:
            _log.info(f"[retention] snapshot {unknown[0]} cannot be read: no blob is deleted")
            return
        needed: set[str] = set().union(*(self._manifests[name].blobs for name in named))
        self._delete(self._there - needed)
        self._manifests = {name: self._manifests[name] for name in named}

    def delete_unpublished(self, blobs: Iterable[str]) -> None:
        """Delete blobs of a snapshot whose publication was never tried."""
        self._there |= set(blobs)
        self._delete(set(blobs))

    def _delete(self, blobs: set[str]) -> None:
        try:
            self._store.delete(sorted(map(blob_key, blobs)))
        except StoreError as error:
            _log.warning(f"[retention] {error}; retrying")
            return
        self._there -= blobs

    def _read_unknown(self) -> None:
        for entry in self._lease.head.checkpoints:
            if entry.name not in self._manifests:
                try:
                    found = read_twice(entry, partial(read_manifest, self._store, entry))
                except DamagedCheckpointError as error:
                    _log.warning(f"[sweep] snapshot {entry.name}: {error}")
                    continue
                self.add(entry.name, found)
