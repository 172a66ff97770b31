"""Checkpoints of a model that is sharded over ranks: each rank writes and reads its share.

The checkpoint's JSON lists the slices, so any number of ranks can read them, and a single process
reads them like any other checkpoint. Unsharded checkpoints can be read share by share too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any

from torch import Tensor

from contract.keys import checkpoint_prefix
from training.record.checkpoint_entry import CheckpointEntry, FileEntry
from training.record.newest_valid import DamagedCheckpointError, read_twice
from training.save.read import (
    fill_slices,
    read_layout,
    read_tensors,
)
from training.save.slices import SLICES, Slice, is_first_holder, local_slice
from training.save.state import STATE, LiveState
from training.store.protocol import Store, StoreError

_OF_RANK = re.compile(r"\.rank-([0-9]+)\.safetensors$")


def own_share(capture: LiveState, rank: int) -> LiveState:
    """What this rank writes: its slices by file, with their positions in the state."""
    files: dict[str, dict[str, Tensor]] = {}
    slices: dict[str, dict[str, Any]] = {}
    for part, tensors in capture.tensors.items():
        stem = f"{part}.rank-{rank:04d}"
        mine = files.setdefault(stem, {})
        about = slices.setdefault(part, {})
        for name, tensor in tensors.items():
            offset, local = local_slice(tensor)
            about[name] = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "slices": [],
            }
            if is_first_holder(tensor, rank) and (local.numel() or not tensor.numel()):
                mine[name] = local.detach()
                own = Slice(file=f"{stem}.safetensors", offset=offset, shape=tuple(local.shape))
                about[name]["slices"].append(asdict(own))
    state = capture.state if rank == 0 else {}
    return replace(capture, tensors=files, state={**state, SLICES: slices})


def merged(slices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the slice lists of all ranks, which have the same tensors."""
    whole: dict[str, Any] = {}
    for part, tensors in slices[0].items():
        whole[part] = {}
        for name, about in tensors.items():
            found = [one for own in slices for one in own[part][name]["slices"]]
            whole[part][name] = {**about, "slices": found}
    return whole


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareProblem:
    """Why a rank cannot use its part of a checkpoint."""

    why: str
    is_damage: bool  # or the store refused to read it


class ShardedContent:
    """A checkpoint of which each rank verifies some files and fills its share of a model."""

    def __init__(
        self,
        store: Store,
        entry: CheckpointEntry,
        state: Mapping[str, Any],
        slices: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.state = state
        self._store = store
        self._entry = entry
        self._slices = slices
        self._files = {file.name: file for file in entry.files}
        self._kept: dict[str, dict[str, Tensor]] = {}

    def verify(self, rank: int, size: int) -> ShareProblem | None:
        """Read and keep this rank's part of the files; return the first problem, if any.

        With as many ranks as wrote it, each reads exactly what it needs.
        """
        mine = [f for k, f in enumerate(self._entry.files) if _reader(k, f, size) == rank]
        for file in mine:
            if file.name == STATE:
                continue
            try:
                self._kept[file.name] = read_twice(self._entry, partial(self._read, file.name))
            except (DamagedCheckpointError, StoreError) as error:
                is_damage = isinstance(error, DamagedCheckpointError)
                return ShareProblem(why=str(error), is_damage=is_damage)
        return None

    def names(self, part: str) -> frozenset[str]:
        """The names of a part's tensors."""
        return frozenset(self._slices.get(part, {}))

    def fill(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill this rank's share of every tensor in place, and free what `verify` kept."""
        fill_slices(self._slices, parts, self._take)
        self._kept.clear()

    def _take(self, file: str) -> Mapping[str, Tensor]:
        return self._kept.pop(file) if file in self._kept else self._read(file)

    def _read(self, file: str) -> dict[str, Tensor]:
        return read_tensors(self._store, checkpoint_prefix(self._entry.name), self._files[file])


def slices_of(store: Store, entry: CheckpointEntry, state: Mapping[str, Any]) -> dict[str, Any]:
    """The slices that a checkpoint lists; if it is not sharded, one slice per tensor."""
    if SLICES in state:
        listed: dict[str, Any] = state[SLICES]
        return listed
    whole: dict[str, Any] = {}
    for file in entry.files:
        if file.name == STATE:
            continue
        whole[PurePath(file.name).stem] = {
            place.name: {
                "shape": list(place.shape),
                "dtype": str(place.dtype).removeprefix("torch."),
                "slices": [
                    {"file": file.name, "offset": [0] * len(place.shape), "shape": place.shape}
                ],
            }
            for place in read_layout(store, checkpoint_prefix(entry.name), file).spans
        }
    return whole


def _reader(number: int, file: FileEntry, size: int) -> int:
    match = _OF_RANK.search(file.name)
    return (int(match[1]) if match else number) % size
