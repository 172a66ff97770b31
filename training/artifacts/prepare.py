"""Prepare stages: derived data, published under artifacts/<key>/ shard by shard, read from there.

A shard's name contains its SHA-256, so shards of an interrupted attempt are verified and reused,
and writers of the same shard do not collide. The index, written last and once, lists the shards.
Runs share derived data under a key of everything that decides its bits. A run keeps its own copy
and never needs the shared one again, so shared shards may be deleted at any time; a run that cannot
read or verify one makes it itself.
"""

import functools
import importlib.metadata
import json
import logging
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from contract.keys import artifact_prefix
from training.artifact_key import key_of
from training.durable import (
    AttemptContext,
    ProgressBar,
    Store,
    StoreError,
    UnfinishedFile,
    World,
    put_unless_changed,
    sha256_of,
)
from training.numerics import code_fingerprint, seed_torch
from training.workload import Inputs, Prepare

_log = logging.getLogger(__name__)

_SHARD = re.compile(r"(?P<shard>[0-9]{5})-(?P<sha256>[0-9a-f]{64})\.safetensors")
# Parts of the numerics key that cannot change a shard: one process makes it, without a Train stage,
# and its code is named separately.
_IRRELEVANT_NUMERICS = ("world", "stages", "code")
# The package that makes a shard, with the stage's own code. Charts, commands and the loop cannot
# affect one: an edit there must not discard every run's derived data.
_MAKER = "artifacts"

INDEX = "index.json"
# A shard that fails its checksum is read once more: it may have been damaged in transit.
_READS = 2


class _DamagedShardError(StoreError):
    """A shard does not match its checksum."""


def ensure_artifact(
    context: AttemptContext, stage: Prepare, inputs_of: Callable[[], Inputs], known: str | None
) -> str:
    """Make missing and damaged shards, divided among the ranks; return the artifact's key.

    `known` is the key that a checkpoint names; `inputs_of` is called only if a shard must be made
    or the key is unknown.
    """
    key = known or stage.key(inputs_of())
    if not re.fullmatch(r"[a-z0-9-]{1,128}", key):
        raise ValueError(f"stage {stage.name!r}: the key {key!r} must match [a-z0-9-]{{1,128}}")
    prefix = artifact_prefix(key)
    world = context.world
    cache = context.scratch / "artifacts" / key
    there = None
    if world.leads:
        store = context.supervisor.hearing(context.store)
        there = _shards_there(store, prefix, stage.num_shards, cache)
    there = world.share(there)
    if there is None:
        _log_once(world, f"[{stage.name}] artifact {key} is complete")
        return key
    num_reused = len(there)
    shared = _SharedArtifacts(context.artifacts, stage, key, context.numerics)
    is_shared = shared.is_used
    if world.leads:
        shared.sweep()
    num_shared = _fill(context, stage, inputs_of(), shared, prefix, there)
    if world.leads:
        _write_index(context.store, prefix, key, [there[k] for k in range(stage.num_shards)])
    world.share(None)  # the other ranks read the index, so they wait for it
    made_of = f"{stage.num_shards} shards, {num_reused} of them reused"
    if is_shared:
        made_of += f", {num_shared} made by other runs"
    _log_once(world, f"[{stage.name}] artifact {key}: {made_of}")
    return key


def _fill(
    context: AttemptContext,
    stage: Prepare,
    inputs: Inputs,
    shared: "_SharedArtifacts",
    prefix: str,
    there: dict[int, dict[str, Any]],
) -> int:
    """Get missing shards, divided among the ranks; return how many came from other runs."""
    world, num_shared = context.world, 0
    missing = [shard for shard in range(stage.num_shards) if shard not in there]
    if shared.is_used:
        # Runs started together make different shards and reuse each other's.
        missing = world.share(random.SystemRandom().sample(missing, len(missing)))
    with ProgressBar(stage.name, stage.num_shards, done=len(there)) as bar:
        for first in range(0, len(missing), world.size):
            context.consensus.stop_unless_time_for("shard")
            batch = missing[first : first + world.size]
            mine = batch[world.rank] if world.rank < len(batch) else None
            got = None
            if mine is not None:
                got = _get_shard(context, stage, inputs, shared, prefix, mine)
            for shard, one in zip(batch, world.gather(got), strict=False):
                assert one is not None
                there[shard], made = one
                num_shared += bool(made["shared"])
                facts = {"stage": stage.name, "shard": shard, "done": len(there), **made}
                context.metrics.write("prepare", **facts)
            if world.leads:
                bar.show(len(there), "shards")
    return num_shared


def open_artifact(store: Store, key: str, cache: Path) -> Sequence[Mapping[str, Tensor]]:
    """Return the shards in order, memory mapped from verified files in the local cache."""
    prefix = artifact_prefix(key)
    found = store.get(prefix + INDEX)
    try:
        shards = _parse_index(found.data if found else b"")
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{store.uri}/{prefix}{INDEX} is missing or damaged; the next attempt makes it again"
        ) from error
    folder = cache / key
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(_cached, store, prefix, shard, folder) for shard in shards]
    return [load_file(result.result()) for result in results]


def _shards_there(
    store: Store, prefix: str, num_shards: int, cache: Path
) -> dict[int, dict[str, Any]] | None:
    """Fetch and verify the stored shards; None if the artifact is complete."""
    indexed = _indexed(store, prefix, num_shards)
    entries = indexed if indexed is not None else list(_listed(store, prefix))
    cache.mkdir(parents=True, exist_ok=True)
    UnfinishedFile.sweep(cache)

    def is_valid(entry: Mapping[str, Any]) -> bool:
        try:
            _cached(store, prefix, entry, cache)
        except (_DamagedShardError, FileNotFoundError) as error:
            _log.warning(f"[artifact] {error}; making it again")
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(is_valid, entries))
    if indexed is not None and all(whole):
        return None
    there: dict[int, dict[str, Any]] = {}
    for entry, is_whole in zip(entries, whole, strict=True):
        if is_whole:
            there.setdefault(int(entry["name"][:5]), dict(entry))
    return there


def _indexed(store: Store, prefix: str, num_shards: int) -> list[dict[str, Any]] | None:
    """Return the entries of the index; None if it is missing or damaged."""
    found = store.get(prefix + INDEX)
    if found is None:
        return None
    try:
        shards = _parse_index(found.data)
        if len(shards) != num_shards:
            raise ValueError(f"it lists {len(shards)} shards of {num_shards}")
    except (ValueError, KeyError, TypeError) as error:
        _log.warning(f"[artifact] {store.uri}/{prefix}{INDEX} is damaged ({error}); rewriting it")
        return None
    return shards


def _parse_index(data: bytes) -> list[dict[str, Any]]:
    """Parse the entries of an index; ValueError, KeyError or TypeError if it is damaged."""
    shards: list[dict[str, Any]] = json.loads(data)["shards"]
    for number, shard in enumerate(shards):
        match = _SHARD.fullmatch(shard["name"])
        if not match or (int(match["shard"]), match["sha256"]) != (number, shard["sha256"]):
            raise ValueError(f"{shard['name']!r} is not shard {number}")
    return shards


def _listed(store: Store, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield entries for the shards of an artifact without an index, from the names of its keys."""
    for key, size in sorted(store.sizes(prefix).items()):
        match = _SHARD.fullmatch(key.removeprefix(prefix))
        if match:
            yield {"name": match[0], "bytes": size, "sha256": match["sha256"]}


def _get_shard(
    context: AttemptContext,
    stage: Prepare,
    inputs: Inputs,
    shared: "_SharedArtifacts",
    prefix: str,
    shard: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fetch a shard made by another run or make it; either way the run keeps a copy.

    Return its entry in the index, and facts for the metrics.
    """
    began = time.monotonic()
    folder = context.scratch / prefix
    with context.supervisor.long_work.doing("shard"):
        fetched = shared.fetch(shard, folder)
        path = fetched or make_shard(stage, inputs, folder, shard)
        context.store.put_file(prefix + path.name, path)
        if fetched is None:
            shared.publish(path)
    size, seconds = path.stat().st_size, round(time.monotonic() - began, 4)
    entry = {"name": path.name, "bytes": size, "sha256": path.stem.partition("-")[2]}
    return entry, {
        "num_shards": stage.num_shards,
        "bytes": size,
        "seconds": seconds,
        "shared": fetched is not None,
    }


def make_shard(stage: Prepare, inputs: Inputs, folder: Path, shard: int) -> Path:
    """Make a shard; return its file, whose name contains its checksum."""
    seed_torch(inputs.device, "prepare", inputs.seed, stage.name, shard)
    tensors = stage.make(inputs, shard)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{shard:05d}.part"
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, part)
    return part.replace(folder / f"{shard:05d}-{sha256_of(part)}.safetensors")


def _write_index(store: Store, prefix: str, key: str, shards: list[dict[str, Any]]) -> None:
    data = json.dumps({"format": 1, "key": key, "shards": shards}, indent=1).encode()
    found = store.get(prefix + INDEX)
    if found is not None and found.data == data:
        return  # a damaged shard was made again with the same bytes
    if not put_unless_changed(store, prefix + INDEX, data, found.etag if found else None):
        _log.info(f"[artifact] the index of {key} was written by another attempt")


def _log_once(world: World, text: str) -> None:
    """Log on rank 0 alone."""
    if world.leads:
        _log.info(text)


def _cached(store: Store, prefix: str, shard: Mapping[str, Any], folder: Path) -> Path:
    path = folder / str(shard["name"])
    if path.is_file() and sha256_of(path) == shard["sha256"]:
        return path
    if (read := _downloaded(store, prefix + path.name, shard["sha256"], path, _READS)) is not None:
        return read
    raise _DamagedShardError(f"{store.uri}/{prefix}{path.name} does not match its checksum")


def _downloaded(store: Store, key: str, sha256: str, path: Path, reads: int) -> Path | None:
    """Download a shard and place it; None if no download matches its checksum."""
    with UnfinishedFile(path) as unfinished:
        for _ in range(reads):
            store.get_file(key, unfinished.path)
            if sha256_of(unfinished.path) == sha256:
                return unfinished.place()
    return None


class _SharedArtifacts:
    """The shared shards of one Prepare stage's artifact; unused if the stage is not shareable."""

    def __init__(
        self, store: Store | None, stage: Prepare, key: str, numerics: Mapping[str, Any]
    ) -> None:
        self._store = store if stage.is_shareable else None
        self._prefix = ""
        if self._store is not None:
            self._prefix = f"{_shared_key(stage, key, numerics)}/"

    @property
    def is_used(self) -> bool:
        """Whether this run still shares the shards of this stage."""
        return self._store is not None

    def fetch(self, shard: int, folder: Path) -> Path | None:
        """Download a verified shard made by another run into `folder`; None if there is none."""
        if self._store is None:
            return None
        try:
            keys = self._store.sizes(self._prefix)
            names = sorted(key.removeprefix(self._prefix) for key in keys)
            for match in filter(None, map(_SHARD.fullmatch, names)):
                if int(match["shard"]) == shard:
                    key = self._prefix + match[0]
                    path = _downloaded(self._store, key, match["sha256"], folder / match[0], 1)
                    if path is not None:
                        return path
                    where = f"{self._store.uri}/{key}"
                    _log.warning(f"[shared] {where} does not match its checksum")
        except (StoreError, FileNotFoundError) as error:
            self._give_up(f"cannot fetch shard {shard}", error)
        return None

    def sweep(self) -> None:
        """Delete what killed runs have left unfinished."""
        if self._store is not None:
            try:
                self._store.sweep(self._prefix)
            except StoreError as error:
                _log.warning(f"[shared] {error}; the next run sweeps")

    def publish(self, path: Path) -> None:
        """Upload a shard for other runs; equal bytes have equal names, so no writers conflict."""
        if self._store is None:
            return
        try:
            self._store.put_file(self._prefix + path.name, path)
        except StoreError as error:
            self._give_up(f"cannot share {path.name}", error)

    def _give_up(self, what: str, error: Exception) -> None:
        """Continue without sharing; logged once."""
        _log.warning(f"[shared] {what}: {error}; this run makes its own shards from here on")
        self._store = None


def _shared_key(stage: Prepare, key: str, numerics: Mapping[str, Any]) -> str:
    """The artifact's key combined with its maker: code, installed packages, device, threads."""
    facts = {
        "key": key,
        "num_shards": stage.num_shards,
        "numerics": {n: v for n, v in numerics.items() if n not in _IRRELEVANT_NUMERICS},
        "python": sys.version,
        "packages": _packages(),
        "code": code_fingerprint(type(stage).__module__, _MAKER),
    }
    return key_of(facts)


@functools.cache
def _packages() -> tuple[str, ...]:
    """Name and version of every installed package: any of them might affect a shard."""
    found = {f"{d.name}=={d.version}" for d in importlib.metadata.distributions()}
    return tuple(sorted(found))
