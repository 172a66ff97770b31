"""Datasets, a folder of files and a manifest with their checksums: make, verify, upload, sync.

    python -m training data sync --dataset-uri s3://bucket/trajectory --out /data/dataset

Imports no torch: it runs at boot, before training.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from contract.keys import MANIFEST
from training.errors import UserError
from training.store.protocol import Store
from training.store.unfinished import UnfinishedFile, sweep

_NUM_THREADS = 8
_CHUNK = 4 * 1024 * 1024

# files done, files in total, bytes done so far
FileProgress: TypeAlias = Callable[[int, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDataset:
    """A dataset whose files are in `folder`."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the workload's `make_dataset` returned."""
        meta: Mapping[str, Any] = self.manifest["meta"]
        return meta

    @property
    def fingerprint(self) -> str:
        """sha256 over names and checksums of all files."""
        lines = [f"{entry['name']} {entry['sha256']}\n" for entry in self.manifest["files"]]
        return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """Files and bytes of a synced or uploaded dataset, those transferred, and the time."""

    files: int
    bytes: int
    fetched_files: int
    fetched_bytes: int
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        """Speed over the whole dataset, including files that were only verified."""
        return self.bytes / 1e6 / max(self.seconds, 1e-9)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(folder: Path, workload: str, meta: Mapping[str, Any]) -> LocalDataset:
    """Write manifest.json about every file in `folder`."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    if not paths:
        raise UserError(f"{folder} contains no files; put the dataset's files there")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sums = list(pool.map(sha256_of, paths))
    files = [
        {
            "name": path.relative_to(folder).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": digest,
        }
        for path, digest in zip(paths, sums, strict=True)
    ]
    manifest = {
        "format": 1,
        "workload": workload,
        "name": folder.resolve().name,
        "files": files,
        "meta": dict(meta),
    }
    _write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    return LocalDataset(folder=folder, manifest=manifest)


def open_dataset(folder: Path, *, verify: bool = False) -> LocalDataset:
    """Open a local dataset; every file must exist with its size (`verify`: and its checksum)."""
    if not folder.is_dir() or not any(folder.iterdir()):
        state = "does not exist"
        if folder.exists():
            state = "is empty" if folder.is_dir() else "is a file"
        raise UserError(
            f"the dataset folder {folder} {state}; make one with "
            "`python -m training data make` or fetch one with `data sync`"
        )
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"the dataset folder {folder} has no {MANIFEST}; sync it again")
    manifest = parse_manifest(path.read_bytes(), str(path))
    for entry in manifest["files"]:
        file = folder / entry["name"]
        if not file.is_file():
            raise UserError(f"{file} is missing; sync the dataset again")
        if file.stat().st_size != entry["bytes"]:
            raise UserError(
                f"{file} has {file.stat().st_size} bytes, not {entry['bytes']} as in the manifest; "
                "sync it again"
            )
        if verify and sha256_of(file) != entry["sha256"]:
            raise UserError(f"{file} does not match its checksum in the manifest; sync it again")
    return LocalDataset(folder=folder, manifest=manifest)


def upload_dataset(folder: Path, store: Store, progress: FileProgress) -> SyncResult:
    """Verify and upload a dataset, the manifest last.

    A file is skipped if it is there and the manifest there has the same checksum for it.
    """
    began = time.monotonic()
    dataset = open_dataset(folder, verify=True)
    files = dataset.manifest["files"]
    before = store.get(MANIFEST)
    known = parse_manifest(before.data, store.uri)["files"] if before else []
    same = {(entry["name"], entry["sha256"]) for entry in known}
    there = store.sizes("")
    store.sweep("")

    def send(entry: Mapping[str, Any]) -> bool:
        name = entry["name"]
        if (name, entry["sha256"]) in same and there.get(name) == entry["bytes"]:
            return False
        store.put_file(name, folder / name)
        return True

    fetched = _for_each(files, send, progress)
    store.put(MANIFEST, (folder / MANIFEST).read_bytes())
    return _synced(files, fetched, began)


def wait_for_manifest(store: Store, wait_seconds: float, missing: Callable[[], None]) -> bool:
    """Wait for a manifest; return whether it is there. `missing` is called once if it is not."""
    deadline = time.monotonic() + wait_seconds
    is_reported = False
    while store.get(MANIFEST) is None:
        if not is_reported:
            is_reported = True
            missing()
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(5.0, max(0.05, wait_seconds / 100), left))
    return True


def sync_dataset(store: Store, out: Path, progress: FileProgress) -> SyncResult:
    """Fetch missing and damaged files into `out`, verify all, and write the manifest last."""
    began = time.monotonic()
    found = store.get(MANIFEST)
    if found is None:
        raise UserError(
            f"{store.uri} has no {MANIFEST}; upload a dataset with "
            f"`python -m training data upload DIR --dataset-uri {store.uri}`"
        )
    files = parse_manifest(found.data, store.uri)["files"]
    out.mkdir(parents=True, exist_ok=True)
    sweep(out)
    if out.resolve() != Path(store.uri).resolve():
        fetched = _for_each(files, lambda entry: _fetch(store, entry, out), progress)
        _write(out / MANIFEST, found.data)
    else:
        fetched = []
        open_dataset(out, verify=True)
    return _synced(files, fetched, began)


def _fetch(store: Store, entry: Mapping[str, Any], out: Path) -> bool:
    target = out / entry["name"]
    if _matches(target, entry):
        return False
    with UnfinishedFile(target) as unfinished:
        # The second attempt is for a failed transfer; a third would hide a wrong upload.
        for _ in range(2):
            try:
                store.get_file(entry["name"], unfinished.path)
            except FileNotFoundError as error:
                raise UserError(
                    f"{store.uri}/{entry['name']} is in the manifest but missing; upload it again"
                ) from error
            if _matches(unfinished.path, entry):
                unfinished.place()
                return True
    raise UserError(
        f"{store.uri}/{entry['name']} does not match its checksum in the manifest; upload it again"
    )


def _write(path: Path, data: bytes) -> None:
    with UnfinishedFile(path) as unfinished:
        unfinished.path.write_bytes(data)
        unfinished.place()


def _matches(path: Path, entry: Mapping[str, Any]) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == entry["bytes"]
        and sha256_of(path) == entry["sha256"]
    )


def _for_each(
    files: Iterable[Mapping[str, Any]],
    act: Callable[[Mapping[str, Any]], bool],
    progress: FileProgress,
) -> list[Mapping[str, Any]]:
    """Call `act` for all files in parallel; return those for which it returned True."""
    entries = list(files)
    lock = threading.Lock()
    done: list[Mapping[str, Any]] = []
    acted: list[Mapping[str, Any]] = []

    def one(entry: Mapping[str, Any]) -> None:
        did = act(entry)
        with lock:
            done.append(entry)
            if did:
                acted.append(entry)
            progress(len(done), len(entries), sum(e["bytes"] for e in done))

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for result in [pool.submit(one, entry) for entry in entries]:
            result.result()
    return acted


def _synced(
    files: list[Mapping[str, Any]], fetched: list[Mapping[str, Any]], began: float
) -> SyncResult:
    return SyncResult(
        files=len(files),
        bytes=sum(entry["bytes"] for entry in files),
        fetched_files=len(fetched),
        fetched_bytes=sum(entry["bytes"] for entry in fetched),
        seconds=time.monotonic() - began,
    )


def parse_manifest(data: bytes, where: str) -> dict[str, Any]:
    """Parse a manifest; UserError says what is wrong with the one at `where`."""
    try:
        manifest = json.loads(data)
        entries, meta = manifest["files"], manifest["meta"]
        paths = [Path(e["name"]) for e in entries if e["bytes"] >= 0 and e["sha256"]]
        is_known = manifest["format"] == 1 and isinstance(manifest["workload"], str)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: invalid {MANIFEST} ({error!r}); make it again") from error
    if not is_known or not isinstance(meta, dict):
        raise UserError(f"{where}: {MANIFEST} has an unknown format; make it again")
    for path in paths:
        if path.is_absolute() or ".." in path.parts:
            raise UserError(
                f"{where}: {MANIFEST} lists {str(path)!r}, which is outside the dataset"
            )
    return dict(manifest)
