"""Checkpoints: safetensors files and one JSON, their checksums in the head. Nothing is pickled.

A checkpoint exists when the head names it and its checksums hold; the newest that does is read, and
each one passed over is named with the reason.
"""

import json
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from contract.keys import checkpoint_prefix
from training.checkpoint.layout import Layout, LayoutError, header_bytes, parse_header
from training.checkpoint.memory import view_of
from training.checkpoint.slices import SLICES, Slice, Sliced, copy_overlap, local_slice
from training.checkpoint.state import STATE
from training.checkpoint.transfer import receive
from training.errors import RunFailedError
from training.record.checkpoint_entry import CheckpointEntry, FileEntry
from training.store.protocol import Store

S = TypeVar("S")

# What a model computes with: its own state, and the moving average of it.
WEIGHTS = frozenset({"model", "ema"})


class DamagedCheckpointError(RuntimeError):
    """A checkpoint that the head names is not what was committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What a checkpoint held: tensors by part, on the CPU, and what JSON can hold."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # part -> name -> tensor in memory of its own
    state: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[S]):
    """A checkpoint that was read."""

    entry: CheckpointEntry
    snapshot: S


def checkpoint_name(step: int, generation: int) -> str:
    """A name that is never used twice and sorts by step."""
    return f"{step:08d}-g{generation:04d}-{secrets.token_hex(4)}"


def read_checkpoint(
    store: Store, entry: CheckpointEntry, parts: Container[str] | None = None
) -> Snapshot:
    """Read and verify one checkpoint, or some of its parts; DamagedCheckpointError says what fails.

    What does not hold is read once more: it may have been damaged on its way here.
    """
    return read_twice(entry, lambda: _read_checkpoint(store, entry, parts))


def read_twice(entry: CheckpointEntry, read: Callable[[], S]) -> S:
    """Read a checkpoint, or something of it; once more where that was damaged, and then raise."""
    try:
        return read()
    except DamagedCheckpointError as error:
        print(f"[read] checkpoint {entry.name}: {error}; reading it again", flush=True)
        return read()


def _read_checkpoint(
    store: Store, entry: CheckpointEntry, parts: Container[str] | None
) -> Snapshot:
    state = read_state(store, entry)
    if SLICES in state:
        slices = state.pop(SLICES)
        own = {part: one for part, one in slices.items() if parts is None or part in parts}
        return Snapshot(tensors=_read_slices(store, entry, own), state=state)
    prefix = checkpoint_prefix(entry.name)
    files = {PurePath(file.name).stem: file for file in entry.files if file.name != STATE}
    tensors = {
        part: read_tensors(store, prefix, file)
        for part, file in files.items()
        if parts is None or part in parts
    }
    return Snapshot(tensors=tensors, state=state)


def read_state(store: Store, entry: CheckpointEntry) -> dict[str, Any]:
    """Read a checkpoint's JSON, after a look at the sizes of all its files."""
    prefix = checkpoint_prefix(entry.name)
    sizes = store.sizes(prefix)
    for file in entry.files:
        _check_size(file, sizes.get(prefix + file.name))
    found = next((file for file in entry.files if file.name == STATE), None)
    if found is None:
        raise DamagedCheckpointError(f"the head names no {STATE}")
    data = bytearray(found.bytes)

    def place_bytes(start: int, block: Tensor) -> None:
        data[start : start + len(block)] = view_of(block)

    _receive(store, prefix, found, place_bytes)
    state: dict[str, Any] = json.loads(data)
    return state


def fill_slices(
    slices: Mapping[str, Mapping[str, Any]],
    targets: Mapping[str, Mapping[str, Tensor]],
    read: Callable[[str], Mapping[str, Tensor]],
) -> None:
    """Fill this process's share of every target from the slices; `read` gives a file's tensors."""
    missing: dict[tuple[str, str], int] = {}
    wanted: dict[str, list[tuple[str, Slice, tuple[int, ...], Tensor]]] = {}
    for part, tensors in targets.items():
        known = slices.get(part, {})
        if unknown := sorted(known.keys() - tensors.keys()):
            raise DamagedCheckpointError(f"{unknown[0]} of {part!r} is none of the model's")
        for name, tensor in tensors.items():
            offset, local = local_slice(tensor)
            about = known.get(name)
            if about is None:
                raise DamagedCheckpointError(f"{name} is not in the checkpoint's {part!r}")
            sliced = Sliced.from_json(about)
            if sliced.shape != tuple(tensor.shape) or sliced.dtype != tensor.dtype:
                there = f"has shape {sliced.shape} of {sliced.dtype}"
                raise DamagedCheckpointError(f"{name} {there}, not the model's")
            missing[part, name] = local.numel()
            for one in sliced.slices:
                if count := one.count_in(offset, local.shape):
                    wanted.setdefault(one.file, []).append((name, one, offset, local))
                    missing[part, name] -= count
    if short := [name for (_, name), count in missing.items() if count]:
        raise DamagedCheckpointError(f"the slices of {short[0]} do not make it up")
    for file, uses in wanted.items():
        tensors_of_file = read(file)
        for name, one, offset, local in uses:
            copy_overlap(tensors_of_file[name], one.offset, local.detach(), offset)


def _read_slices(
    store: Store, entry: CheckpointEntry, slices: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """The whole of the tensors, in one process."""
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


def read_layout(store: Store, prefix: str, file: FileEntry) -> Layout:
    """Where the tensors of a safetensors file lie; nothing is verified yet."""
    try:
        first = _read(store, prefix, file, min(8, file.bytes))
        header = _read(store, prefix, file, header_bytes(first, file.bytes))
        return parse_header(header, file.bytes)
    except LayoutError as error:
        raise DamagedCheckpointError(f"{file.name}: {error}") from error


def read_tensors(store: Store, prefix: str, file: FileEntry) -> dict[str, Tensor]:
    """Read one safetensors file; every tensor gets memory of its own, as torch aligns it.

    Memory at another alignment changes the last bits of matrix-vector products, so nothing is
    computed on bytes where they lay in a file.
    """
    layout = read_layout(store, prefix, file)
    tensors = {place.name: torch.empty(place.shape, dtype=place.dtype) for place in layout.spans}

    def place_bytes(start: int, block: Tensor) -> None:
        stop = start + len(block)
        for place in layout.overlapping(start, stop):
            first, last = max(start, place.start), min(stop, place.stop)
            target = tensors[place.name].view(-1).view(torch.uint8)
            target[first - place.start : last - place.start] = block[first - start : last - start]

    _receive(store, prefix, file, place_bytes)
    return tensors


def newest_that_holds(
    store: Store,
    entries: Sequence[CheckpointEntry],
    read: Callable[[Store, CheckpointEntry], S] = read_checkpoint,  # type: ignore[assignment]
) -> tuple[Loaded[S] | None, tuple[tuple[str, str], ...]]:
    """The newest checkpoint whose checksums hold, and those passed over as (name, why)."""
    passed_over: list[tuple[str, str]] = []
    for entry in reversed(entries):
        try:
            snapshot = read(store, entry)
        except DamagedCheckpointError as error:
            passed_over.append((entry.name, str(error)))
            continue
        return Loaded(entry=entry, snapshot=snapshot), tuple(passed_over)
    return None, tuple(passed_over)


def find_nan(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN (an infinity may be meant, as in masks)."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.element_size() == 1:
            tensor = tensor.float()  # nothing is computed in 8 bits
        # The smallest of numbers of which one is no number is none; isnan would make a copy.
        if bool(tensor.detach().amin().isnan()):
            return name
    return None


def refuse_nan(tensors: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
    """RunFailedError if a weight is no number, in whichever files of the model."""
    for part, own in tensors.items():
        if part.split(".")[0] == "model" and (name := find_nan(own)) is not None:
            raise RunFailedError(
                f"{where}: {name} holds a NaN; "
                "nothing was published, lower the learning rate or clip the gradients"
            )


def _check_size(file: FileEntry, size: int | None) -> None:
    if size is None:
        raise DamagedCheckpointError(f"{file.name} is missing")
    if size != file.bytes:
        raise DamagedCheckpointError(f"{file.name} has {size} bytes instead of {file.bytes}")


def _read(store: Store, prefix: str, file: FileEntry, size: int) -> bytes:
    """The first bytes of a file, which nothing has verified yet."""
    data = bytearray(size)
    with _missing(file):
        store.read_into(prefix + file.name, 0, memoryview(data))
    return bytes(data)


def _receive(
    store: Store, prefix: str, file: FileEntry, place_bytes: Callable[[int, Tensor], None]
) -> None:
    with _missing(file):
        if not receive(store, prefix + file.name, file, place_bytes):
            raise DamagedCheckpointError(f"{file.name} does not match its sha256")


@contextmanager
def _missing(file: FileEntry) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{file.name} is missing") from error
