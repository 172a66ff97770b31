"""Rank 0 in the saves of a sharded stage: it orders every other rank to write its share.

Rank 0 decides and commits; its main thread orders at the points of a stage where the others listen
(`ShardedFollower.obey`). Ranks announce their files on a board, from any thread: a save continues
behind the training, and a staged copy is written where no main thread reaches a boundary.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from training.attempt.world import World
from training.errors import DivergedError, Divergence
from training.record.checkpoint_entry import FileEntry
from training.save.slices import SLICES
from training.save.state import step_of
from training.store.parts import CancelledError
from training.store.protocol import StoreError

# copy: copy, then write behind the training; live: write before training continues; stage: copy
# and wait; drop: cancel what is being written.
Verb: TypeAlias = Literal["copy", "live", "stage", "drop"]

# The board's key for the staged save that is to be written at once.
STAGED = "staged"
TICK_SECONDS = 0.5
# A rank that writes posts ticks; one that has not for this long is gone.
_SILENT_SECONDS = 10.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What every other rank does with its share of the save of this name."""

    verb: Verb
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShare:
    """What one rank has written of a save, or what went wrong."""

    files: tuple[FileEntry, ...] = ()
    slices: Mapping[str, Any] | None = None
    error: str = ""
    has_nan: bool = False  # `error` says where in the weights

    def to_text(self) -> str:
        """Serialize for the board."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "WrittenShare":
        """Parse what `to_text` wrote."""
        record = json.loads(text)
        files = tuple(FileEntry(**file) for file in record.pop("files"))
        return cls(files=files, **record)


def share_key(name: str, rank: int) -> str:
    """The board's key under which a rank announces its share of a save."""
    return f"{name}/{rank}"


class ShardedLeader:
    """Orders the other ranks and waits for what they write."""

    def __init__(self, world: World) -> None:
        self._world = world

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """The other ranks obey inside this context."""
        try:
            yield
        except DivergedError:
            self._world.share_flag(False)  # the ranks go on, and then back, together
            raise
        self._world.share_flag(False)

    def order(self, verb: Verb, name: str) -> None:
        """Order all other ranks, from the main thread, inside `leading`."""
        self._world.share_flag(True)
        self._world.share(Order(verb=verb, name=name))

    def have_staged(self, is_staged: bool) -> bool:
        """Whether every rank could stage, rank 0 included; after the order to stage."""
        return all(self._world.gather(is_staged))

    def write_staged(self, name: str) -> None:
        """Make the others write their staged copies; from any thread, whatever they are doing."""
        self._world.post(STAGED, name)

    def wait_for(self, name: str, stop: threading.Event) -> list[WrittenShare]:
        """Wait for every other rank's share; raise the error that one of them met."""
        missing = dict.fromkeys(range(1, self._world.size), (time.monotonic(), ""))
        found: dict[int, WrittenShare] = {}
        while missing:
            for rank, (since, tick) in list(missing.items()):
                if (text := self._world.note(share_key(name, rank))) is not None:
                    found[rank] = WrittenShare.from_text(text)
                    del missing[rank]
                    _raise_for(rank, found[rank], step_of(name))
                    continue
                now = self._world.note(f"{share_key(name, rank)}/tick") or ""
                if now != tick:
                    missing[rank] = (time.monotonic(), now)
                elif time.monotonic() - since > _SILENT_SECONDS:
                    raise StoreError(f"rank {rank} wrote nothing for {_SILENT_SECONDS:g} s")
            if missing and stop.wait(_POLL_SECONDS):
                raise CancelledError("the save was cancelled")
        return [found[rank] for rank in sorted(found)]


def _raise_for(rank: int, written: WrittenShare, step: int) -> None:
    if written.has_nan:
        raise DivergedError(Divergence(step=step, message=f"rank {rank}: {written.error}"))
    if written.error:
        raise StoreError(f"rank {rank}: {written.error}")
    assert written.slices is not None, f"rank {rank} announced no {SLICES}"


def refuse_wrong_sizes(there: Mapping[str, int], prefix: str, files: Sequence[FileEntry]) -> None:
    """Raise StoreError if a file in the store is missing or not as large as announced."""
    for file in files:
        if there.get(prefix + file.name) != file.bytes:
            size = there.get(prefix + file.name, "no")
            raise StoreError(f"{prefix}{file.name} has {size} bytes instead of {file.bytes}")
