"""Saves of a sharded stage: rank 0 leads, and every other rank writes its share when ordered to.

Rank 0 decides and commits; its main thread gives orders at the points of a stage where the others
listen (`ShardedFollower.obey`). Ranks announce their files on a board, from any thread: a save goes
on in the background, and a staged copy is written even if no main thread reaches a boundary.
"""

import base64
import contextlib
import itertools
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor

from training.durable.attempt.world import AttemptContext, World
from training.durable.errors import DivergedError, Divergence
from training.durable.record.head import step_of
from training.durable.save.publish import Save
from training.durable.save.tensors.state import (
    SLICES,
    HostCopies,
    HostCopy,
    LiveState,
    Slice,
    is_sharded,
    local_slice,
    send_state,
)
from training.durable.store.protocol import StoreError
from training.durable.store.transfer import CancelledError, FileEntry

# copy: copy, then write in the background; live: write before training continues; stage: copy and
# wait; drop: cancel what is being written.
Verb: TypeAlias = Literal["copy", "live", "stage", "drop"]

# What the other ranks have written of a save: their files, and the slices in them.
OtherShares: TypeAlias = tuple[Sequence[FileEntry], Sequence[Mapping[str, Any]]]

# The board's key for the staged save that is to be written at once.
_STAGED = "staged"
_TICK_SECONDS = 0.5
# A rank that writes posts ticks; one that has not for this long is gone.
_SILENT_SECONDS = 10.0
_POLL_SECONDS = 0.01
_CLOSE_SECONDS = 10.0
_LISTEN_SECONDS = 0.1


def own_share(capture: LiveState, rank: int) -> LiveState:
    """Return what this rank writes: its slices by file, with their positions in the state."""
    files: dict[str, dict[str, Tensor]] = {}
    slices: dict[str, dict[str, Any]] = {}
    for part, tensors in capture.tensors.items():
        stem = f"{part}.rank-{rank:04d}"
        files[stem] = {}
        about = slices.setdefault(part, {})
        for name, tensor in tensors.items():
            offset, local = local_slice(tensor)
            about[name] = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "slices": [],
            }
            if _is_first_holder(tensor, rank) and (local.numel() or not tensor.numel()):
                # What every rank needs is in a file of its own, which is small.
                file = stem if is_sharded(tensor) else f"{part}.whole"
                files.setdefault(file, {})[name] = local.detach()
                own = Slice(file=f"{file}.safetensors", offset=offset, shape=tuple(local.shape))
                about[name]["slices"].append(asdict(own))
    state = capture.state if rank == 0 else {}
    return replace(capture, tensors=files, state={**state, SLICES: slices})


def _is_first_holder(tensor: Tensor, rank: int) -> bool:
    """Whether this process writes its share, as the first of those with the same share."""
    if not is_sharded(tensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _WrittenShare:
    """The share of a save that one rank has written, or what went wrong."""

    files: tuple[FileEntry, ...] = ()
    slices: Mapping[str, Any] | None = None
    error: str = ""
    has_nan: bool = False  # `error` names the place in the weights

    def to_text(self) -> str:
        """Serialize for the board, which keeps each text for as long as the attempt lasts."""
        return base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode())).decode()

    @classmethod
    def from_text(cls, text: str) -> "_WrittenShare":
        """Parse what `to_text` wrote."""
        record = json.loads(zlib.decompress(base64.b64decode(text)))
        files = tuple(FileEntry(**file) for file in record.pop("files"))
        return cls(files=files, **record)


def _share_key(name: str, rank: int) -> str:
    """The board's key under which a rank announces its share of a save."""
    return f"{name}/{rank}"


class ShardedLeader:
    """Orders the other ranks and waits for what they write."""

    def __init__(self, world: World) -> None:
        self._world = world

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Lead the other ranks, which obey inside this context."""
        try:
            yield
        except DivergedError:
            self._world.share_flag(False)  # the ranks go on, and then back, together
            raise
        self._world.share_flag(False)

    def order(self, verb: Verb, name: str) -> None:
        """Order the others, from the main thread in `leading`, to act on their shares."""
        self._world.share_flag(True)
        self._world.share((verb, name))

    def have_staged(self, is_staged: bool) -> bool:
        """Return, after the order to stage, whether every rank could, rank 0 included."""
        return all(self._world.gather(is_staged))

    def write_staged(self, name: str) -> None:
        """Make the others write their staged copies; from any thread, whatever they are doing."""
        self._world.post(_STAGED, name)

    def wait_for(self, name: str, stop: threading.Event) -> OtherShares:
        """Wait for every other rank's share; raise the error of any that failed."""
        missing = dict.fromkeys(range(1, self._world.size), (time.monotonic(), ""))
        found: dict[int, _WrittenShare] = {}
        while missing:
            for rank, (since, tick) in list(missing.items()):
                if (text := self._world.note(_share_key(name, rank))) is not None:
                    found[rank] = _WrittenShare.from_text(text)
                    del missing[rank]
                    _raise_for(rank, found[rank], step_of(name))
                    continue
                now = self._world.note(f"{_share_key(name, rank)}/tick") or ""
                if now != tick:
                    missing[rank] = (time.monotonic(), now)
                elif time.monotonic() - since > _SILENT_SECONDS:
                    raise StoreError(f"rank {rank} wrote nothing for {_SILENT_SECONDS:g} s")
            if missing and stop.wait(_POLL_SECONDS):
                raise CancelledError("the save was cancelled")
        shares = [found[rank] for rank in sorted(found)]
        files = [file for share in shares for file in share.files]
        return files, [share.slices for share in shares if share.slices]


def _raise_for(rank: int, written: _WrittenShare, step: int) -> None:
    if written.has_nan:
        raise DivergedError(Divergence(step=step, message=f"rank {rank}: {written.error}"))
    if written.error:
        raise StoreError(f"rank {rank}: {written.error}")
    assert written.slices is not None, f"rank {rank} announced no {SLICES}"


class _ShareSave(Save):
    """A save of what this rank writes of the checkpoint with that name."""

    def __init__(
        self,
        context: AttemptContext,
        name: str,
        state: LiveState | HostCopy,
        over: threading.Event | None = None,
    ) -> None:
        super().__init__(over=over)
        self.name, self.state = name, state
        self._context = context

    def publish(self) -> None:
        """Write this rank's files, and post a list of them, or what went wrong."""
        name, state, world = self.name, self.state, self._context.world
        try:
            files = send_state(self._context.store, name, state, self.progress, name)
            written = _WrittenShare(files=files, slices=state.state[SLICES])
        except CancelledError:
            raise
        except DivergedError as error:
            written = _WrittenShare(error=error.divergence.message, has_nan=True)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            written = _WrittenShare(error=str(error))
        world.post(_share_key(name, world.rank), written.to_text())


class ShardedFollower:
    """Obeys at the points of a stage where rank 0 leads; keeps the copy that was staged."""

    def __init__(self, context: AttemptContext, num_copiers: int) -> None:
        self._context = context
        self._world = context.world
        self._copies = HostCopies(context.store.part_process, num_copiers)
        self._writes: list[_ShareSave] = []  # under way, or over
        self._live: _ShareSave | None = None  # reads tensors that training changes
        self._staged: _ShareSave | None = None

    def obey(self, capture: Callable[[], LiveState]) -> bool:
        """Carry out rank 0's orders until training continues; return whether there were any."""
        was_ordered = False
        while self._world.share_flag(False):
            order: tuple[Verb, str] | None = self._world.share(None)
            assert order is not None
            verb, name = order
            if verb == "drop":
                # Not waited for: what is being sent may take longer than a notice leaves.
                for write in self._writes:
                    if write.name == name:
                        write.cancel()
                self._live = None  # what it still reads is never committed
            elif verb == "stage":
                self._stage(name, capture)
            else:
                self._write(name, capture, is_live=verb == "live")
            was_ordered = True
        if self._live is not None:
            self._live.wait()
            self._live = None
        return was_ordered

    def give_up(self) -> None:
        """Cancel every write: rank 0 has decided what the attempt leaves behind."""
        for write in self._writes:
            write.cancel()

    def close(self) -> None:
        """Finish the writes under way: their state was good, and rank 0 may commit it."""
        self._staged = None
        for write in self._writes:
            write.wait(_CLOSE_SECONDS)

    def _cancel(self, writes: list[_ShareSave]) -> None:
        for write in writes:
            write.cancel()
            write.wait()

    def _stage(self, name: str, capture: Callable[[], LiveState]) -> None:
        share = capture()
        self._staged = None  # superseded, and its memory may be needed
        self._writes = [write for write in self._writes if not write.is_over]
        sources = (write.state for write in self._writes)
        writing = next((source for source in sources if isinstance(source, HostCopy)), None)
        copy = self._copies.copy(share, writing)
        self._world.gather(copy is not None)
        if copy is not None:
            self._staged = _ShareSave(self._context, name, copy)
            self._listen(self._staged)

    def _write(self, name: str, capture: Callable[[], LiveState], *, is_live: bool) -> None:
        over = threading.Event()
        # Before the copy: the first one takes long, especially in page-locked memory.
        _tick(self._world, name, over)
        share = capture()
        self._staged = None  # superseded, and its memory may be needed
        # To rank 0 the earlier saves are over: it has committed them, or never will.
        self._cancel([write for write in self._writes if not write.is_over])
        copy = None if is_live else self._copies.copy(share, None)
        write = _ShareSave(self._context, name, copy or share, over)
        self._writes = [write]
        self._live = write if copy is None else None
        write.start()

    def _listen(self, staged: _ShareSave) -> None:
        """Watch for the order to write the staged copy while the main threads do long work."""

        def listen() -> None:
            while self._staged is staged:
                if self._world.note(_STAGED) == staged.name:
                    self.give_up()
                    _tick(self._world, staged.name, staged.over)
                    staged.start()
                    return
                staged.wait(_LISTEN_SECONDS)

        threading.Thread(target=listen, name="staged", daemon=True).start()


def _tick(world: World, name: str, over: threading.Event) -> None:
    """Show rank 0 that this rank is at work on a save, until it is over."""
    key = f"{_share_key(name, world.rank)}/tick"

    def tick() -> None:
        for number in itertools.count():
            world.post(key, str(number))
            if over.wait(_TICK_SECONDS):
                return

    threading.Thread(target=tick, name="tick", daemon=True).start()
