"""Keeps the blobs that a snapshot of the head needs, and deletes the others.

Blobs that all of these snapshots need are stored twice, or one damaged blob would damage them all.

Why no writer deletes what another needs, however late it wakes:
1. A blob's name is never used twice, so a late deletion hits only the blob it was meant for.
2. A writer deletes a blob only after it has itself written a head whose snapshots do not need it,
   and never uses the blob again.
3. A successor uses only blobs of snapshots that the head named when it took over. That head is the
   one of 2, or a later one by the same writer, whose snapshots do not use the blob either.
4. A take-over sweeps only blobs of earlier generations, whose writers the store now refuses.
   What such a writer still sends is swept by the next take-over, or at the end of the run.
"""

import hashlib
import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from functools import partial

from contract.keys import BLOB_NAME, BLOBS, blob_key, blob_of, second_key
from training.durable.attempt.resume_point import DamagedCheckpointError, read_twice
from training.durable.record.lease import Lease
from training.durable.save.capture import Known
from training.durable.save.listing import FileState
from training.durable.save.manifest import Content, FolderManifest
from training.durable.save.restore import read_manifest
from training.durable.store.protocol import Store, StoreError
from training.durable.store.transfer import CancelledError, Contents, Spare, TransferProgress, send

_log = logging.getLogger(__name__)


class Blobs:
    """The blobs of a run, as the holder of its lease sees them; used by one thread at a time.

    Only `copy_shared` runs concurrently with the other methods.
    """

    def __init__(self, store: Store, lease: Lease) -> None:
        self.known = Known()  # what the next snapshot need not send
        self.newest: FolderManifest | None = None  # the last one committed or restored
        self.stop_copying = threading.Event()
        self._copying = threading.Lock()
        self._copied: set[str] = set()
        self._damaged: set[str] = set()  # the next snapshot sends their contents again
        self._store = store
        self._lease = lease
        self._manifests: dict[str, FolderManifest] = {}  # by name: all that the head may name
        self._there: set[str] = set()  # blobs that may exist

    def begin_with(self, manifest: FolderManifest, files: Mapping[FileState, Content]) -> None:
        """Start from a folder that equals this snapshot, which was committed or restored."""
        self.newest, self.known = manifest, Known.after(manifest, files).without(self._damaged)

    def found_damaged(self, blobs: Iterable[str]) -> None:
        """Stop using them: the folder has their contents, which the next snapshot sends again."""
        self._damaged |= set(blobs)
        self.known = self.known.without(self._damaged)

    def add(self, name: str, manifest: FolderManifest) -> None:
        """Add a snapshot before trying to publish it: that may succeed without an answer."""
        self._manifests[name] = manifest
        self._there |= manifest.blobs.keys()

    def sweep(self) -> None:
        """Delete the blobs of earlier generations that no snapshot of the head needs."""
        generation = self._lease.head.generation
        try:
            self._read_unknown()
            keys = self._store.sizes(BLOBS)
        except StoreError as error:
            _log.warning(f"[sweep] {error}; the next take-over sweeps")
            return
        names = {name for name in map(blob_of, keys) if name}
        self._copied |= {name for name in names if second_key(name) in keys}
        matches = filter(None, map(BLOB_NAME.fullmatch, names))
        self._there |= {match[0] for match in matches if int(match["generation"]) < generation}
        self.delete_unneeded()

    def delete_unneeded(self) -> None:
        """Delete the blobs that no snapshot of the head needs; nothing waits for it."""
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

    def copy_shared(self, num_snapshots: int) -> None:
        """Store a second copy of each blob that all snapshots need, once there are `num_snapshots`.

        Copies at most what one snapshot needs, each byte once, in one thread nothing waits for.
        """
        head = self._lease.head
        kept = [self._manifests.get(e.name) for e in head.checkpoints if not e.is_left_behind]
        known = [manifest for manifest in kept if manifest is not None]
        if len(known) < len(kept) or len(kept) < num_snapshots:
            return
        shared = set(known[0].blobs).intersection(*(one.blobs for one in known))
        if not self._copying.acquire(blocking=False):
            return
        try:
            for blob in sorted(shared - self._copied - self._damaged):
                self._copy(blob, known[-1])
        except CancelledError:
            pass  # the next commit or attempt does it
        except StoreError as error:
            _log.warning(f"[second copy] {error}; retrying after the next commit")
        finally:
            self._copying.release()

    def _copy(self, blob: str, manifest: FolderManifest) -> None:
        contents = [one for one in manifest.contents.values() if one.blob == blob]
        source = _StoredBlob(self._store, blob, manifest.blobs[blob], contents)
        progress = TransferProgress(stop=self.stop_copying)
        try:
            (sent,) = send(self._store, BLOBS, [source], progress, num_threads=1)
            source.refuse_damaged(sent.sha256)
        except (DamagedCheckpointError, FileNotFoundError) as error:
            _log.warning(f"[second copy] {blob} is damaged ({error}); its files are sent again")
            self._store.delete([second_key(blob)])
            self.found_damaged([blob])
            return
        self._copied.add(blob)
        if blob not in self._there:  # no snapshot needs it any more
            self._store.delete([second_key(blob)])

    def _delete(self, blobs: set[str]) -> None:
        keys = [key(blob) for blob in sorted(blobs) for key in (blob_key, second_key)]
        try:
            self._store.delete(keys)
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


class _StoredBlob(Contents):
    """A blob in the store as the contents of its second copy, verified as it is read."""

    def __init__(self, store: Store, blob: str, size: int, contents: Collection[Content]) -> None:
        self.name = second_key(blob).removeprefix(BLOBS)
        self._store, self._key, self._size = store, blob_key(blob), size
        self._contents = contents

    @property
    def size(self) -> int:
        return self._size

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        data = spare(stop - start)
        self._store.read_into(self._key, start, data)
        for one in self._contents:  # the files of a pack, or the single file of another blob
            own = data[one.start - start : one.start - start + one.bytes]
            if one.bytes < self._size and hashlib.sha256(own).hexdigest() != one.sha256:
                raise DamagedCheckpointError("a file in it does not match its SHA-256")
        return data

    def refuse_damaged(self, sha256: str) -> None:
        """Raise DamagedCheckpointError if the one file that it holds has another checksum."""
        if any(one.bytes == self._size and one.sha256 != sha256 for one in self._contents):
            raise DamagedCheckpointError("it does not match its SHA-256")
