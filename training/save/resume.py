"""Resuming: rank 0 looks for the newest valid checkpoint, and all ranks read it.

For a stage that is sharded over the ranks, each of them verifies and keeps its part of the files;
otherwise rank 0 reads the checkpoint and sends it to the others. A checkpoint's JSON lists the
slices of its tensors, so any number of ranks can read them, and unsharded ones share by share too.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, TypeAlias

from torch import Tensor

from contract.keys import checkpoint_prefix
from training.attempt.context import AttemptContext
from training.record.checkpoint_entry import CheckpointEntry, FileEntry
from training.record.newest_valid import DamagedCheckpointError, Loaded, newest_valid, read_twice
from training.record.position import Position
from training.save.read import (
    CheckpointContent,
    fill_slices,
    read_checkpoint,
    read_layout,
    read_state,
    read_tensors,
)
from training.save.slices import SLICES
from training.save.state import STATE
from training.store.protocol import Store, StoreError

_OF_RANK = re.compile(r"\.rank-([0-9]+)\.safetensors$")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShareProblem:
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

    def verify(self, rank: int, size: int) -> _ShareProblem | None:
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
                return _ShareProblem(why=str(error), is_damage=is_damage)
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


AnyContent: TypeAlias = CheckpointContent | ShardedContent


def find_newest(
    context: AttemptContext,
    is_sharded: Callable[[str], bool],
    verify_beginning: Callable[[Position], None],
) -> tuple[Loaded[AnyContent] | None, Sequence[tuple[str, str]]]:
    """On rank 0: the newest valid checkpoint, and those passed over as (name, reason).

    `verify_beginning` raises DamagedCheckpointError or StoreError if the stage end that the
    checkpoint's stage started from cannot be used. The other ranks are in `follow` meanwhile.
    """

    def read(store: Store, entry: CheckpointEntry) -> AnyContent:
        snapshot = _read(context, is_sharded, store, entry)
        try:
            if entry.kind != "stage-end":
                verify_beginning(Position.from_json(snapshot.state["position"]))
        except (DamagedCheckpointError, StoreError) as error:
            raise type(error)(f"{error}, and its stage started from there") from error
        return snapshot

    found = newest_valid(context.store, context.lease, context.events, read)
    context.world.share(None)
    return found


def follow(context: AttemptContext) -> ShardedContent | None:
    """On the other ranks: verify what rank 0 asks for; return the last snapshot, kept."""
    kept: ShardedContent | None = None
    while (asked := context.world.share(None)) is not None:
        kept = ShardedContent(context.store, *asked)
        context.world.gather(kept.verify(context.world.rank, context.world.size))
    return kept


def share_snapshot(
    context: AttemptContext, position: Position | None, snapshot: AnyContent | None
) -> tuple[Position | None, AnyContent | None]:
    """Share what rank 0 has found; of a sharded checkpoint each rank has its own part."""
    world = context.world
    position = world.share(position)
    state = world.share(snapshot.state if world.leads and snapshot is not None else None)
    if not world.share(isinstance(snapshot, CheckpointContent)) or state is None:
        return position, snapshot if state is not None else None
    given = snapshot.tensors if world.leads and isinstance(snapshot, CheckpointContent) else None
    parts = world.share(() if given is None else tuple(given))
    tensors = {part: world.share_tensors(None if given is None else given[part]) for part in parts}
    return position, CheckpointContent(tensors=tensors, state=state)


def _read(
    context: AttemptContext,
    is_sharded: Callable[[str], bool],
    store: Store,
    entry: CheckpointEntry,
) -> AnyContent:
    if not is_sharded(entry.stage):
        return read_checkpoint(store, entry)
    state = read_twice(entry, lambda: read_state(store, entry))
    slices = slices_of(store, entry, state)
    state.pop(SLICES, None)
    world = context.world
    world.share((entry, state, slices))
    snapshot = ShardedContent(store, entry, state, slices)
    found = [one for one in world.gather(snapshot.verify(world.rank, world.size)) if one]
    if found:
        # Damage decides: what another rank could not read would not help.
        worst = max(found, key=lambda problem: problem.is_damage)
        raise (DamagedCheckpointError if worst.is_damage else StoreError)(worst.why)
    return snapshot
