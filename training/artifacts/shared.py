"""Shards of derived data that runs share: a place beside them, under everything that decides bits.

A run keeps a copy of its own and never needs the shared one again, so that one may go at any time.
What is read is held against the checksum in its name; whoever fails here makes the shard itself.
"""

import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import training
from training.artifact_key import artifact_key
from training.capabilities import IsShareable
from training.store.dataset import sha256_of
from training.store.protocol import Store, StoreError
from training.workload import Prepare

SHARD = re.compile(r"(?P<shard>[0-9]{5})-(?P<sha256>[0-9a-f]{64})\.safetensors")
# Of the numerics key: what does not reach a shard, which one process makes by itself.
_NOT_OF_SHARDS = ("world", "stages")


class SharedArtifacts:
    """The shared shards of one Prepare stage's artifact, or of none: then nothing is there."""

    def __init__(
        self, store: Store | None, stage: Prepare, key: str, numerics: Mapping[str, Any]
    ) -> None:
        is_shareable = isinstance(stage, IsShareable) and stage.is_shareable
        self._store = store if is_shareable else None
        self._prefix = ""
        if self._store is not None:
            self._prefix = f"{shared_key(stage, key, numerics)}/"

    @property
    def is_used(self) -> bool:
        """Whether there is such a place for this stage."""
        return self._store is not None

    def fetch(self, shard: int, folder: Path) -> Path | None:
        """A shard that another run has made, whole, in `folder`; None: make it."""
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
            self._give_up(f"shard {shard} is not taken from there", error)
        return None

    def _fetch(self, store: Store, match: re.Match[str], folder: Path) -> Path | None:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{match[0]}.part"
        store.get_file(self._prefix + match[0], part)
        if sha256_of(part) == match["sha256"]:
            return part.replace(folder / match[0])
        part.unlink()
        print(f"[shared] {store.uri}/{self._prefix}{match[0]} does not match its name", flush=True)
        return None

    def publish(self, path: Path) -> None:
        """Give a shard to the other runs. The same bytes have the same name, so no writer harms."""
        if self._store is None:
            return
        try:
            self._store.put_file(self._prefix + path.name, path)
        except StoreError as error:
            self._give_up(f"{path.name} is not given to other runs", error)

    def _sizes(self) -> Mapping[str, int]:
        assert self._store is not None
        return self._store.sizes(self._prefix)

    def _give_up(self, what: str, error: Exception) -> None:
        """The run goes on alone, and is told so once."""
        print(f"[shared] {what}: {error}; this run makes its own from here on", flush=True)
        self._store = None


def shared_key(stage: Prepare, key: str, numerics: Mapping[str, Any]) -> str:
    """The artifact's own key with who makes it: code, installed packages, device, threads."""
    facts = {
        "key": key,
        "num_shards": stage.num_shards,
        "numerics": {n: v for n, v in numerics.items() if n not in _NOT_OF_SHARDS},
        "python": sys.version,
        "packages": _packages(),
        "code": _code_of(type(stage).__module__),
    }
    return artifact_key(facts)


@cache
def _packages() -> tuple[str, ...]:
    """Name and version of all that is installed: which of them reach a shard nobody knows."""
    found = {f"{d.name}=={d.version}" for d in importlib.metadata.distributions()}
    return tuple(sorted(found))


@cache
def _code_of(module: str) -> str:
    """Hash over the engine's sources and those of the package, or module, of the stage."""
    digest = hashlib.sha256()
    for root in dict.fromkeys([_root(training.__name__), _root(module.partition(".")[0])]):
        for path in _sources(root):
            digest.update(path.relative_to(root.parent).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _root(module: str) -> Path:
    """The folder of a package (also of one without __init__.py), or the file of a module."""
    spec = sys.modules[module].__spec__
    assert spec is not None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    assert spec.origin is not None
    return Path(spec.origin)


def _sources(root: Path) -> Iterator[Path]:
    yield from [root] if root.is_file() else sorted(root.rglob("*.py"))
