"""The newest checkpoint or snapshot whose checksums match; each one passed over has its reason.

Where none of them can be read, the run does not start again: this machine or its way to the store
may be damaged, and a run that began again would delete them. Imports no torch.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from training.errors import MachineError
from training.record.checkpoint_entry import CheckpointEntry
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)

S = TypeVar("S")
# Then an older one is tried first: what failed may have been something else once.
_MOST_FAILED_STARTS = 2


class DamagedCheckpointError(RuntimeError):
    """A checkpoint that the head names is missing data or fails its checksums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[S]):
    """A checkpoint that was read and verified."""

    entry: CheckpointEntry
    content: S


def read_twice(entry: CheckpointEntry, read: Callable[[], S]) -> S:
    """Read a checkpoint or a part of it; if that fails, once more, and then raise."""
    try:
        return read()
    except (DamagedCheckpointError, StoreError) as error:
        _log.warning(f"[read] checkpoint {entry.name}: {error}; reading it again")
        return read()


def newest_valid(
    store: Store,
    entries: Sequence[CheckpointEntry],
    read: Callable[[Store, CheckpointEntry], S],
) -> tuple[Loaded[S] | None, tuple[tuple[str, str], ...]]:
    """The newest checkpoint whose checksums match, and those passed over as (name, why).

    None if there are none at all. If none can be read: StoreError if the store refused one of them,
    else MachineError.
    """
    passed_over: list[tuple[str, str]] = []
    refused: list[StoreError] = []
    given_up = {entry.name: entry for entry in entries if _is_given_up(entry)}
    ordered = [*given_up.values(), *(entry for entry in entries if entry.name not in given_up)]
    for entry in reversed(ordered):
        try:
            content = read(store, entry)
        except (DamagedCheckpointError, StoreError) as error:
            passed_over.append((entry.name, str(error)))
            if isinstance(error, StoreError):
                refused.append(error)
            continue
        if entry.name not in given_up:
            passed_over += [(name, _why_given_up(one)) for name, one in given_up.items()]
        for name, why in passed_over:
            _log.warning("[resume] passed over checkpoint %s: %s", name, why)
        return Loaded(entry=entry, content=content), tuple(passed_over)
    if refused:
        raise StoreError(
            f"no checkpoint of {store.uri} can be read: {refused[0]}; "
            "the run is kept, start again once they can be read"
        )
    if passed_over:
        name, why = passed_over[0]
        raise MachineError(
            f"none of the {len(passed_over)} checkpoints of {store.uri} can be verified on this "
            f"machine (the newest, {name}: {why}); all of them are kept, and another machine tries "
            "again; if it cannot either, restore the objects' last versions, or use a new run ID"
        )
    return None, ()


def _is_given_up(entry: CheckpointEntry) -> bool:
    return entry.is_tentative and entry.failed_starts >= _MOST_FAILED_STARTS


def _why_given_up(entry: CheckpointEntry) -> str:
    return (
        "taken when the program ended itself after a notice, and it failed "
        f"{entry.failed_starts} times on it"
    )
