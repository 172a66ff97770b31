"""Where an attempt resumes: at the newest valid checkpoint, by these rules.

If no checkpoint can be read, this machine ends and not the run: it or its path to the store may be
faulty; once a second machine has found the same, the run starts over. Imports no torch.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from training.durable.errors import MachineError
from training.durable.record.head import CheckpointEntry
from training.durable.record.lease import Lease
from training.durable.record.metrics import Events
from training.durable.store.protocol import LastingError, Store, StoreError

_log = logging.getLogger(__name__)

_S = TypeVar("_S")
# After these it is passed over; a single failure may have another cause.
_MOST_FAILED_STARTS = 2


class DamagedCheckpointError(RuntimeError):
    """A checkpoint that the head names is missing data or fails its checksums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[_S]):
    """A checkpoint that was read and verified."""

    entry: CheckpointEntry
    content: _S


def read_twice(entry: CheckpointEntry, read: Callable[[], _S]) -> _S:
    """Read a checkpoint or a part of it; if that fails, once more, and then raise."""
    try:
        return read()
    except (DamagedCheckpointError, StoreError) as error:
        _log.warning(f"[read] checkpoint {entry.name}: {error}; reading it again")
        return read()


def newest_valid(
    store: Store, lease: Lease, events: Events, read: Callable[[Store, CheckpointEntry], _S]
) -> tuple[Loaded[_S] | None, tuple[tuple[str, str], ...]]:
    """Find the newest checkpoint whose checksums match, and those passed over as (name, why).

    None if the run starts over, or for the first time. If none can be read: StoreError if the store
    refused one of them, MachineError if this machine is the first to find them damaged.
    """
    entries = [entry for entry in lease.head.checkpoints if not entry.is_left_behind]
    if entries and all(map(_is_given_up, entries)):
        given_up = tuple((entry.name, _why_given_up(entry)) for entry in reversed(entries))
        about = [{"name": name, "why": why} for name, why in given_up]
        events.emit("none-valid", "failed", passed_over=about, starts_over=True)
        _log.warning(
            "[resume] the program has failed twice on each snapshot that is kept: starting over; "
            "they are left behind: python -m training reopen --from-checkpoint "
            f"{entries[-1].step} --run-uri {store.uri} goes back to one"
        )
        lease.start_over()
        return None, given_up
    found, passed_over = _first_valid(store, entries, read)
    for name, why in passed_over:
        _log.warning("[resume] passed over checkpoint %s: %s", name, why)
    if found is not None:
        lease.forget_unverified()
    elif passed_over:
        starts_over = lease.count_unverified()
        about = [{"name": name, "why": why} for name, why in passed_over]
        events.emit("none-valid", "failed", passed_over=about, starts_over=starts_over)
        if not starts_over:
            raise MachineError(_none_valid(store, passed_over))
        _log.warning("[resume] another machine could use none of them either: starting over")
    return found, passed_over


def _none_valid(store: Store, passed_over: Sequence[tuple[str, str]]) -> str:
    name, why = passed_over[0]
    return (
        f"none of the {len(passed_over)} checkpoints of {store.uri} can be used on this machine "
        f"(the newest, {name}: {why}); all of them are kept, and the run starts over only if "
        "another machine cannot use them either; to start over at once: "
        f"python -m training reopen --from-scratch --run-uri {store.uri}"
    )


def _first_valid(
    store: Store, entries: Sequence[CheckpointEntry], read: Callable[[Store, CheckpointEntry], _S]
) -> tuple[Loaded[_S] | None, tuple[tuple[str, str], ...]]:
    passed_over: list[tuple[str, str]] = []
    refused: list[StoreError] = []
    for entry in reversed(entries):
        if _is_given_up(entry):
            passed_over.append((entry.name, _why_given_up(entry)))
            continue
        try:
            content = read(store, entry)
        except (DamagedCheckpointError, StoreError) as error:
            passed_over.append((entry.name, str(error)))
            if isinstance(error, StoreError):
                refused.append(error)
            continue
        return Loaded(entry=entry, content=content), tuple(passed_over)
    if refused:
        lasts = all(isinstance(each, LastingError) for each in refused)
        raise (LastingError if lasts else StoreError)(
            f"no checkpoint of {store.uri} can be read: {refused[0]}; "
            "the run is kept; start it again once they can be read"
        )
    return None, tuple(passed_over)


def _is_given_up(entry: CheckpointEntry) -> bool:
    return entry.failed_starts >= _MOST_FAILED_STARTS


def _why_given_up(entry: CheckpointEntry) -> str:
    return f"the program failed {entry.failed_starts} times while it read it"
