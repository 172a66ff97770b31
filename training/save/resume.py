"""Resuming: rank 0 looks for the newest valid checkpoint, and all ranks read it.

For a stage that is sharded over the ranks, each of them verifies and keeps its part of the files;
otherwise rank 0 reads the checkpoint and sends it to the others.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from training.attempt.context import AttemptContext
from training.record.checkpoint_entry import CheckpointEntry
from training.record.newest_valid import DamagedCheckpointError, Loaded, newest_valid, read_twice
from training.record.position import Position
from training.save.read import (
    CheckpointContent,
    read_checkpoint,
    read_state,
)
from training.save.sharded import ShardedContent, slices_of
from training.save.slices import SLICES
from training.store.protocol import Store, StoreError

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

    found = newest_valid(context.store, context.lease.head.checkpoints, read)
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
