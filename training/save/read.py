"""Reading checkpoints: safetensors files and one JSON, with checksums in the head; no pickle.

A checkpoint is valid if the head names it and its checksums match.
"""

import json
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from contract.keys import checkpoint_prefix
from training.record.checkpoint_entry import CheckpointEntry, FileEntry
from training.record.newest_valid import DamagedCheckpointError, read_twice
from training.save.layout import FileLayout, LayoutError, header_bytes, parse_header
from training.save.slices import SLICES, Slice, Sliced, copy_overlap, local_slice
from training.save.state import STATE
from training.save.transfer import receive
from training.store.protocol import Store

# What a model computes with: its own state, and its moving average.
WEIGHTS = frozenset({"model", "ema"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContent:
    """The content of a checkpoint: tensors by part, on the CPU, and the JSON state."""

    tensors: dict[str, dict[str, Tensor]]  # part -> name -> tensor in its own memory
    state: Mapping[str, Any]

    def take(self, part: str) -> dict[str, Tensor]:
        """Hand over a part's tensors: whoever holds the snapshot holds them no longer."""
        return self.tensors.pop(part)


def read_checkpoint(
    store: Store, entry: CheckpointEntry, parts: Container[str] | None = None
) -> CheckpointContent:
    """Read and verify one checkpoint, or some of its parts; may raise DamagedCheckpointError.

    What fails is read once more: it may have been damaged in transit.
    """
    return read_twice(entry, lambda: _read_checkpoint(store, entry, parts))


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
        _check_size(file, sizes.get(prefix + file.name))
    found = next((file for file in entry.files if file.name == STATE), None)
    if found is None:
        raise DamagedCheckpointError(f"the head names no {STATE}")
    data = bytearray(found.bytes)

    def place_bytes(start: int, block: memoryview) -> None:
        data[start : start + len(block)] = block

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
            raise DamagedCheckpointError(f"{unknown[0]} of {part!r} is not in the model")
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
        raise DamagedCheckpointError(f"the slices of {short[0]} do not cover it")
    for file, uses in wanted.items():
        tensors_of_file = read(file)
        for name, one, offset, local in uses:
            copy_overlap(tensors_of_file[name], one.offset, local.detach(), offset)


def _read_slices(
    store: Store, entry: CheckpointEntry, slices: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Read whole tensors in one process."""
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


def read_layout(store: Store, prefix: str, file: FileEntry) -> FileLayout:
    """Read the layout of a safetensors file, before its checksum is verified."""
    try:
        first = _read(store, prefix, file, min(8, file.bytes))
        header = _read(store, prefix, file, header_bytes(first, file.bytes))
        return parse_header(header, file.bytes)
    except LayoutError as error:
        raise DamagedCheckpointError(f"{file.name}: {error}") from error


def read_tensors(store: Store, prefix: str, file: FileEntry) -> dict[str, Tensor]:
    """Read one safetensors file into tensors with their own memory, as torch aligns it.

    Another alignment changes the last bits of matrix-vector products, so tensors must not be views
    of a file's bytes.
    """
    layout = read_layout(store, prefix, file)
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


def _check_size(file: FileEntry, size: int | None) -> None:
    if size is None:
        raise DamagedCheckpointError(f"{file.name} is missing")
    if size != file.bytes:
        raise DamagedCheckpointError(f"{file.name} has {size} bytes instead of {file.bytes}")


def _read(store: Store, prefix: str, file: FileEntry, size: int) -> bytes:
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
            raise DamagedCheckpointError(f"{file.name} does not match its SHA-256")


@contextmanager
def _missing(file: FileEntry) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{file.name} is missing") from error
