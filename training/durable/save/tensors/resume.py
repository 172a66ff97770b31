"""Reads checkpoints, and resumes: rank 0 looks for the newest valid one, and all ranks read it.

A checkpoint is valid if the head names it and its checksums match: safetensors files and one JSON,
no pickle. For a stage that is sharded over the ranks, each of them verifies and keeps its part of
the files; otherwise rank 0 reads the checkpoint and sends it to the others. A checkpoint's JSON
lists the slices of its tensors, so any number of ranks can read them, each its own share, even from
an unsharded checkpoint.
"""

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from contract.keys import checkpoint_prefix
from training.durable.attempt.resume_point import (
    DamagedCheckpointError,
    Loaded,
    newest_valid,
    read_twice,
)
from training.durable.attempt.world import AttemptContext
from training.durable.record.head import CheckpointEntry, Position
from training.durable.save.tensors.state import (
    SLICES,
    STATE,
    FileLayout,
    Slice,
    copy_overlap,
    header_bytes,
    local_slice,
    parse_header,
)
from training.durable.store.protocol import Store, StoreError
from training.durable.store.transfer import FileEntry, receive

_WEIGHTS = frozenset({"model", "ema"})
_NUM_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContent:
    """The content of a checkpoint: tensors by part, on the CPU, and the JSON state."""

    tensors: dict[str, dict[str, Tensor]]  # part -> name -> tensor in its own memory
    state: Mapping[str, Any]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate and export: the moving average if the stage has one."""
        return {**self.tensors["model"], **self.tensors.get("ema", {})}

    @classmethod
    def read(
        cls, store: Store, entry: CheckpointEntry, parts: Container[str] | None = None
    ) -> "CheckpointContent":
        """Read and verify one checkpoint, or some of its parts; may raise DamagedCheckpointError.

        A failed read is repeated once: data may have been damaged in transit.
        """
        return read_twice(entry, lambda: _read_checkpoint(store, entry, parts))

    @classmethod
    def read_weights(cls, store: Store, entry: CheckpointEntry) -> "CheckpointContent":
        """Read what a model computes with: its own state, and its moving average."""
        return cls.read(store, entry, _WEIGHTS)

    def take(self, part: str) -> dict[str, Tensor]:
        """Hand over a part's tensors, which this object then no longer holds."""
        return self.tensors.pop(part)


def _read_checkpoint(
    store: Store, entry: CheckpointEntry, parts: Container[str] | None
) -> CheckpointContent:
    state = read_state(store, entry)
    if SLICES in state:
        slices = state.pop(SLICES)
        own = {part: one for part, one in slices.items() if parts is None or part in parts}
        return CheckpointContent(tensors=_read_slices(store, entry, own), state=state)
    prefix = checkpoint_prefix(entry.name)
    files = {PurePath(file.name).stem: file for file in entry.files if file.name != STATE}
    tensors = {
        part: read_tensors(store, prefix, file)
        for part, file in files.items()
        if parts is None or part in parts
    }
    return CheckpointContent(tensors=tensors, state=state)


def read_state(store: Store, entry: CheckpointEntry) -> dict[str, Any]:
    """Read a checkpoint's JSON, after checking the sizes of all its files."""
    prefix = checkpoint_prefix(entry.name)
    sizes = store.sizes(prefix)
    for file in entry.files:
        size = sizes.get(prefix + file.name)
        if size is None:
            raise DamagedCheckpointError(f"{file.name} is missing")
        if size != file.bytes:
            raise DamagedCheckpointError(f"{file.name} has {size} bytes instead of {file.bytes}")
    found = next((file for file in entry.files if file.name == STATE), None)
    if found is None:
        raise DamagedCheckpointError(f"the head names no {STATE}")
    data = bytearray(found.bytes)

    def place_bytes(start: int, block: memoryview) -> None:
        data[start : start + len(block)] = block

    _receive(store, prefix, found, place_bytes)
    state: dict[str, Any] = json.loads(data)
    return state


def misfit(mine: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """Return what keeps `tensors` from being a state like `mine`, a model's; empty if nothing does.

    What get_extra_state returns, and parameters that are still lazy, may have any shape.
    """
    problems = [f"{name} is missing" for name in mine if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in mine]
    problems += [
        f"{name} is {_shape(tensors[name])} there and {_shape(tensor)} here"
        for name, tensor in mine.items()
        if name in tensors and not (name.endswith("_extra_state") or is_lazy(tensor))
        if tensors[name].shape != tensor.shape
    ]
    more = len(problems) - _NUM_NAMED
    return "; ".join(problems[:_NUM_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def fill_slices(
    slices: Mapping[str, Mapping[str, Any]],
    targets: Mapping[str, Mapping[str, Tensor]],
    read: Callable[[str], Mapping[str, Tensor]],
) -> None:
    """Fill this process's share of each target from the slices; `read` returns a file's tensors."""
    missing: dict[tuple[str, str], int] = {}
    wanted: dict[str, list[tuple[str, Slice, tuple[int, ...], Tensor]]] = {}
    for part, tensors in targets.items():
        known = slices.get(part, {})
        if unknown := sorted(known.keys() - tensors.keys()):
            raise DamagedCheckpointError(f"{unknown[0]} of {part!r} is not in the model")
        for name, tensor in tensors.items():
            offset, local = local_slice(tensor)
            about = known.get(name)
            if about is None:
                raise DamagedCheckpointError(f"{name} is not in the checkpoint's {part!r}")
            shape, dtype = tuple(about["shape"]), getattr(torch, about["dtype"])
            if shape != tuple(tensor.shape) or dtype != tensor.dtype:
                there = f"has shape {shape} of {dtype}"
                raise DamagedCheckpointError(f"{name} {there}, not the model's")
            missing[part, name] = local.numel()
            for one in map(Slice.from_json, about["slices"]):
                if count := one.count_in(offset, local.shape):
                    wanted.setdefault(one.file, []).append((name, one, offset, local))
                    missing[part, name] -= count
    if short := [name for (_, name), count in missing.items() if count]:
        raise DamagedCheckpointError(f"the slices of {short[0]} do not cover it")
    for file, uses in wanted.items():
        tensors_of_file = read(file)
        for name, one, offset, local in uses:
            copy_overlap(tensors_of_file[name], one.offset, local.detach(), offset)


def _read_slices(
    store: Store, entry: CheckpointEntry, slices: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Read complete tensors in one process."""
    tensors = {
        part: {
            name: torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]))
            for name, about in own.items()
        }
        for part, own in slices.items()
    }
    files = {file.name: file for file in entry.files}
    prefix = checkpoint_prefix(entry.name)
    fill_slices(slices, tensors, lambda name: read_tensors(store, prefix, files[name]))
    return tensors


def _read_layout(store: Store, prefix: str, file: FileEntry) -> FileLayout:
    """Read the layout of a safetensors file, before its checksum is verified."""
    try:
        first = _read_first(store, prefix, file, min(8, file.bytes))
        header = _read_first(store, prefix, file, header_bytes(first, file.bytes))
        return parse_header(header, file.bytes)
    except ValueError as error:
        raise DamagedCheckpointError(f"{file.name}: {error}") from error


def read_tensors(store: Store, prefix: str, file: FileEntry) -> dict[str, Tensor]:
    """Read one safetensors file into tensors with their own memory, as torch aligns it.

    Another alignment changes the last bits of matrix-vector products, so tensors must not be views
    of a file's bytes.
    """
    layout = _read_layout(store, prefix, file)
    tensors = {place.name: torch.empty(place.shape, dtype=place.dtype) for place in layout.spans}

    def place_bytes(start: int, data: memoryview) -> None:
        if not data:
            return
        block = torch.frombuffer(data, dtype=torch.uint8)
        stop = start + len(block)
        for place in layout.overlapping(start, stop):
            first, last = max(start, place.start), min(stop, place.stop)
            target = tensors[place.name].view(-1).view(torch.uint8)
            target[first - place.start : last - place.start] = block[first - start : last - start]

    _receive(store, prefix, file, place_bytes)
    return tensors


def _read_first(store: Store, prefix: str, file: FileEntry, size: int) -> bytes:
    """Read the first bytes of a file, unverified."""
    data = bytearray(size)
    with _missing(file):
        store.read_into(prefix + file.name, 0, memoryview(data))
    return bytes(data)


def _receive(
    store: Store, prefix: str, file: FileEntry, place_bytes: Callable[[int, memoryview], None]
) -> None:
    with _missing(file):
        if not receive(store, prefix + file.name, file, place_bytes):
            raise DamagedCheckpointError(f"{file.name} does not match its checksum")


@contextmanager
def _missing(file: FileEntry) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{file.name} is missing") from error


_OF_RANK = re.compile(r"\.rank-([0-9]+)\.safetensors$")


@dataclass(slots=True)
class ShardedContent:
    """A checkpoint of which each rank verifies some files and fills its share of a model."""

    store: Store
    entry: CheckpointEntry
    state: Mapping[str, Any]
    slices: Mapping[str, Mapping[str, Any]]
    _kept: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False)

    def verify(self, rank: int, size: int) -> DamagedCheckpointError | StoreError | None:
        """Read and keep this rank's part of the files; return the first error, if any.

        With as many ranks as wrote it, each reads exactly what it needs.
        """
        mine = [f for k, f in enumerate(self.entry.files) if _reader(k, f, size) == rank]
        for file in mine:
            if file.name == STATE:
                continue
            try:
                self._kept[file.name] = read_twice(self.entry, partial(self._read, file.name))
            except (DamagedCheckpointError, StoreError) as error:
                return error.with_traceback(None)  # which would hold what was read
        return None

    def names(self, part: str) -> frozenset[str]:
        """The names of a part's tensors."""
        return frozenset(self.slices.get(part, {}))

    def fill(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill this rank's share of every tensor in place, and free what `verify` kept."""
        fill_slices(self.slices, parts, self._take)
        self._kept.clear()

    def _take(self, file: str) -> Mapping[str, Tensor]:
        return self._kept.pop(file) if file in self._kept else self._read(file)

    def _read(self, file: str) -> dict[str, Tensor]:
        about = next(one for one in self.entry.files if one.name == file)
        return read_tensors(self.store, checkpoint_prefix(self.entry.name), about)


def slices_of(store: Store, entry: CheckpointEntry, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the slices that a checkpoint lists; if it is not sharded, one slice per tensor."""
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
            for place in _read_layout(store, checkpoint_prefix(entry.name), file).spans
        }
    return whole


def _reader(number: int, file: FileEntry, size: int) -> int:
    match = _OF_RANK.search(file.name)
    return (int(match[1]) if match else number) % size


_AnyContent: TypeAlias = CheckpointContent | ShardedContent


class Resume:
    """The search for where an attempt resumes, in which all its ranks take part."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context

    def find_newest(
        self,
        is_sharded: Callable[[str], bool],
        verify_beginning: Callable[[Position], None],
    ) -> tuple[Loaded[_AnyContent] | None, Sequence[tuple[str, str]]]:
        """On rank 0, find the newest valid checkpoint, and those passed over as (name, reason).

        `verify_beginning` raises DamagedCheckpointError or StoreError if the stage end that the
        checkpoint's stage started from cannot be used. Meanwhile the other ranks are in `follow`.
        """

        def read(store: Store, entry: CheckpointEntry) -> _AnyContent:
            if is_sharded(entry.stage):
                snapshot: _AnyContent = self._read_shares(store, entry)
            else:
                snapshot = CheckpointContent.read(store, entry)
            try:
                if entry.kind != "stage-end":
                    verify_beginning(Position.from_json(snapshot.state["position"]))
            except (DamagedCheckpointError, StoreError) as error:
                raise type(error)(f"{error}, and its stage started from there") from error
            return snapshot

        context = self._context
        store = context.supervisor.hearing(context.store)
        found = newest_valid(store, context.lease, context.events, read)
        context.world.share(None)
        return found

    def _read_shares(self, store: Store, entry: CheckpointEntry) -> ShardedContent:
        """Read a checkpoint on all ranks, each its share."""
        state = read_twice(entry, lambda: read_state(store, entry))
        slices = slices_of(store, entry, state)
        state.pop(SLICES, None)
        world = self._context.world
        world.share((entry, state, slices))
        snapshot = ShardedContent(store, entry, state, slices)
        errors = [one for one in world.gather(snapshot.verify(world.rank, world.size)) if one]
        if errors:
            # Damage decides: what another rank could not read would not help.
            raise max(errors, key=lambda error: isinstance(error, DamagedCheckpointError))
        return snapshot

    def follow(self) -> ShardedContent | None:
        """On the other ranks, verify what rank 0 asks for; return the last, kept in memory."""
        context = self._context
        kept: ShardedContent | None = None
        while (asked := context.world.share(None)) is not None:
            kept = ShardedContent(context.store, *asked)
            context.world.gather(kept.verify(context.world.rank, context.world.size))
        return kept

    def share(
        self, position: Position | None, snapshot: _AnyContent | None
    ) -> tuple[Position | None, _AnyContent | None]:
        """Share what rank 0 has found; each rank has its own part of a sharded checkpoint."""
        world = self._context.world
        position = world.share(position)
        state = world.share(snapshot.state if world.leads and snapshot is not None else None)
        if not world.share(isinstance(snapshot, CheckpointContent)) or state is None:
            return position, snapshot if state is not None else None
        given = (
            snapshot.tensors if world.leads and isinstance(snapshot, CheckpointContent) else None
        )
        parts = world.share(() if given is None else tuple(given))
        tensors = {
            part: world.share_tensors(None if given is None else given[part]) for part in parts
        }
        return position, CheckpointContent(tensors=tensors, state=state)
