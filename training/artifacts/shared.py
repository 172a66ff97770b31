"""Derived data that several runs share, stored under a key of everything that decides its bits.

A run keeps its own copy and never needs the shared one again, so shared shards may be deleted at
any time. A shard is verified against the checksum in its name; a run that cannot read or verify
one makes it itself.
"""

import importlib.metadata
import logging
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from training.artifact_key import artifact_key
from training.code_fingerprint import code_fingerprint
from training.store.protocol import Store, StoreError
from training.store.unfinished import UnfinishedFile
from training.store.verified import sha256_of
from training.workload import Prepare

SHARD = re.compile(r"(?P<shard>[0-9]{5})-(?P<sha256>[0-9a-f]{64})\.safetensors")
_log = logging.getLogger(__name__)
# Parts of the numerics key that cannot change a shard: one process makes it, without a Train stage,
# and its code is named by itself.
_IRRELEVANT_NUMERICS = ("world", "stages", "code")
# What makes a shard, besides the stage's own code. Charts, commands and the loop cannot reach one:
# an edit there must not discard every run's derived data.
MAKERS = ("artifacts", "engine/numerics.py")


class SharedArtifacts:
    """The shared shards of one Prepare stage's artifact; unused if the stage is not shareable."""

    def __init__(
        self, store: Store | None, stage: Prepare, key: str, numerics: Mapping[str, Any]
    ) -> None:
        self._store = store if stage.is_shareable else None
        self._prefix = ""
        if self._store is not None:
            self._prefix = f"{shared_key(stage, key, numerics)}/"

    @property
    def is_used(self) -> bool:
        """Whether this run still shares the shards of this stage."""
        return self._store is not None

    def fetch(self, shard: int, folder: Path) -> Path | None:
        """Download a verified shard made by another run into `folder`; None if there is none."""
        if self._store is None:
            return None
        try:
            names = sorted(key.removeprefix(self._prefix) for key in self._sizes())
            for match in filter(None, map(SHARD.fullmatch, names)):
                if int(match["shard"]) == shard:
                    fetched = self._fetch(self._store, match, folder)
                    if fetched is not None:
                        return fetched
        except (StoreError, FileNotFoundError) as error:
            self._give_up(f"cannot fetch shard {shard}", error)
        return None

    def _fetch(self, store: Store, match: re.Match[str], folder: Path) -> Path | None:
        with UnfinishedFile(folder / match[0]) as unfinished:
            store.get_file(self._prefix + match[0], unfinished.path)
            if sha256_of(unfinished.path) == match["sha256"]:
                return unfinished.place()
        _log.warning(f"[shared] {store.uri}/{self._prefix}{match[0]} does not match its checksum")
        return None

    def sweep(self) -> None:
        """Delete what runs that were killed have left unfinished."""
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

    def _sizes(self) -> Mapping[str, int]:
        assert self._store is not None
        return self._store.sizes(self._prefix)

    def _give_up(self, what: str, error: Exception) -> None:
        """Continue without sharing; logged once."""
        _log.warning(f"[shared] {what}: {error}; this run makes its own shards from here on")
        self._store = None


def shared_key(stage: Prepare, key: str, numerics: Mapping[str, Any]) -> str:
    """The artifact's key combined with its maker: code, installed packages, device, threads."""
    facts = {
        "key": key,
        "num_shards": stage.num_shards,
        "numerics": {n: v for n, v in numerics.items() if n not in _IRRELEVANT_NUMERICS},
        "python": sys.version,
        "packages": _packages(),
        "code": code_fingerprint(type(stage).__module__, *MAKERS),
    }
    return artifact_key(facts)


@cache
def _packages() -> tuple[str, ...]:
    """Name and version of every installed package: any of them might affect a shard."""
    found = {f"{d.name}=={d.version}" for d in importlib.metadata.distributions()}
    return tuple(sorted(found))
