"""Saves to which every rank of a sharded stage gives its share: what rank 0 says, what it hears.

Rank 0 decides and publishes; its main thread orders at the points of a stage where the others
listen (`ShardedFollower.obey`). Files are announced on the ranks' board, from any thread: a save
goes on behind the training, and a staged one where no main thread comes to a boundary.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from training.checkpoint.slices import SLICES
from training.checkpoint.transfer import CancelledError
from training.errors import RunFailedError
from training.ranks.world import World
from training.record.checkpoint_entry import FileEntry
from training.store.protocol import StoreError

# copy: then write behind the training; live: write before training goes on; stage: copy and wait
# for the word; drop: give up what is being written.
Verb: TypeAlias = Literal["copy", "live", "stage", "drop"]

# On the board: the staged save that is to be written at once.
STAGED = "staged"
TICK_SECONDS = 0.5
# A rank that writes ticks; one that does not for so long is gone.
_SILENT_SECONDS = 10.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What every other rank does with its share for the save of this name."""

    verb: Verb
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What one rank has written of a save, or what went wrong."""

    files: tuple[FileEntry, ...] = ()
    slices: Mapping[str, Any] | None = None
    error: str = ""
    is_hopeless: bool = False  # the run fails: its weights are no numbers

    def to_text(self) -> str:
        """As posted."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Written":
        """Read what `to_text` wrote."""
        record = json.loads(text)
        files = tuple(FileEntry(**file) for file in record.pop("files"))
        return cls(files=files, **record)


def place_on_board(name: str, rank: int) -> str:
    """The key under which a rank announces what it has written of a save."""
    return f"{name}/{rank}"


class ShardedLeader:
    """Rank 0's word to the others."""

    def __init__(self, world: World) -> None:
        self._world = world

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """The others listen here until this ends."""
        yield
        self._world.share_flag(False)

    def order(self, verb: Verb, name: str) -> None:
        """To all others, in the main thread, while leading."""
        self._world.share_flag(True)
        self._world.share(Order(verb=verb, name=name))

    def have_staged(self, is_staged: bool) -> bool:
        """Whether every rank could, rank 0 included, after the order to stage."""
        return all(self._world.gather(is_staged))

    def write_staged(self, name: str) -> None:
        """Have the others write their staged copies, from any thread, whatever they do."""
        self._world.post(STAGED, name)

    def wait_for(self, name: str, stop: threading.Event) -> list[Written]:
        """What each other rank has written, once all have; raises what one of them met."""
        missing = dict.fromkeys(range(1, self._world.size), (time.monotonic(), ""))
        found: dict[int, Written] = {}
        while missing:
            for rank, (since, tick) in list(missing.items()):
                if (text := self._world.note(place_on_board(name, rank))) is not None:
                    found[rank] = Written.from_text(text)
                    del missing[rank]
                    _raise_for(rank, found[rank])
                    continue
                now = self._world.note(f"{place_on_board(name, rank)}/tick") or ""
                if now != tick:
                    missing[rank] = (time.monotonic(), now)
                elif time.monotonic() - since > _SILENT_SECONDS:
                    raise StoreError(f"rank {rank} wrote nothing for {_SILENT_SECONDS:g} s")
            if missing and stop.wait(_POLL_SECONDS):
                raise CancelledError("the save was cancelled")
        return [found[rank] for rank in sorted(found)]


def _raise_for(rank: int, written: Written) -> None:
    if written.is_hopeless:
        raise RunFailedError(f"rank {rank}: {written.error}")
    if written.error:
        raise StoreError(f"rank {rank}: {written.error}")
    assert written.slices is not None, f"rank {rank} announced no {SLICES}"


def refuse_wrong_sizes(there: Mapping[str, int], prefix: str, files: Sequence[FileEntry]) -> None:
    """StoreError if the store has another file than a rank announced, or none."""
    for file in files:
        if there.get(prefix + file.name) != file.bytes:
            size = there.get(prefix + file.name, "no")
            raise StoreError(f"{prefix}{file.name} has {size} bytes instead of {file.bytes}")
