"""Checkpoints: safetensors files and one JSON, their sha256 in the head. Nothing is pickled.

A checkpoint exists when the head names it and its checksums hold; the newest that does is read, and
each one passed over is named with the reason.
"""

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.dataset import sha256_of
from training.head import CheckpointEntry, FileEntry
from training.store import Store

STATE = "state.json"


class DamagedCheckpointError(RuntimeError):
    """A checkpoint that the head names is not what was committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A copy of everything that a step boundary is: tensors by part, and what JSON can hold."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # part -> name -> tensor on the CPU
    state: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint that was read."""

    entry: CheckpointEntry
    snapshot: Snapshot


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU in memory of their own, as torch aligns it.

    Memory at another alignment changes the last bits of matrix-vector products, so what is read
    from a file must be copied before it is computed with.
    """
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


def take_apart(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Split a state_dict of any depth: tensors go to `tensors`, the JSON skeleton is returned."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[k, take_apart(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        parts = [take_apart(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
        return {type(value).__name__: parts}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{path}: a {type(value).__name__} cannot be kept in a checkpoint")


def put_together(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `take_apart`."""
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: put_together(value, tensors) for key, value in content}
    if kind in ("list", "tuple"):
        parts = [put_together(value, tensors) for value in content]
        return tuple(parts) if kind == "tuple" else parts
    return content


def checkpoint_name(step: int, generation: int) -> str:
    """A name that is never used twice and sorts by step."""
    return f"{step:08d}-g{generation:04d}-{secrets.token_hex(4)}"


def write_files(snapshot: Snapshot, folder: Path) -> tuple[FileEntry, ...]:
    """Write a snapshot's files into a new local folder."""
    folder.mkdir(parents=True)
    for part, tensors in snapshot.tensors.items():
        save_file(dict(tensors), folder / f"{part}.safetensors")
    (folder / STATE).write_text(json.dumps(snapshot.state))
    paths = sorted(folder.iterdir())
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(sha256_of, paths))
    return tuple(
        FileEntry(name=path.name, bytes=path.stat().st_size, sha256=digest)
        for path, digest in zip(paths, sums, strict=True)
    )


def upload_files(store: Store, name: str, folder: Path, files: Sequence[FileEntry]) -> None:
    """Upload a checkpoint's files; it exists once the head names it."""
    with ThreadPoolExecutor(4) as pool:
        sent = [
            pool.submit(store.put_file, f"checkpoints/{name}/{file.name}", folder / file.name)
            for file in files
        ]
    for result in sent:
        result.result()


def read_checkpoint(store: Store, entry: CheckpointEntry, scratch: Path) -> Snapshot:
    """Download and verify one checkpoint; DamagedCheckpointError says what does not hold."""
    folder = scratch / f"read-{entry.name}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(_fetch, store, entry.name, file, folder) for file in entry.files]
        for result in results:
            result.result()
        state = json.loads((folder / STATE).read_text())
        tensors = {
            path.stem: copy_tensors(load_file(path)) for path in folder.glob("*.safetensors")
        }
        return Snapshot(tensors=tensors, state=state)
    finally:
        shutil.rmtree(folder)


def newest_that_holds(
    store: Store, entries: Sequence[CheckpointEntry], scratch: Path
) -> tuple[Loaded | None, tuple[tuple[str, str], ...]]:
    """The newest checkpoint whose checksums hold, and those passed over as (name, why)."""
    passed_over: list[tuple[str, str]] = []
    for entry in reversed(entries):
        try:
            snapshot = read_checkpoint(store, entry, scratch)
        except DamagedCheckpointError as error:
            passed_over.append((entry.name, str(error)))
            continue
        return Loaded(entry=entry, snapshot=snapshot), tuple(passed_over)
    return None, tuple(passed_over)


def has_nan(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN (an infinity may be meant, as in masks)."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
            return name
    return None


def _fetch(store: Store, name: str, file: FileEntry, folder: Path) -> None:
    path = folder / file.name
    try:
        store.get_file(f"checkpoints/{name}/{file.name}", path)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{file.name} is missing") from error
    if path.stat().st_size != file.bytes:
        raise DamagedCheckpointError(
            f"{file.name} has {path.stat().st_size} bytes instead of {file.bytes}"
        )
    if sha256_of(path) != file.sha256:
        raise DamagedCheckpointError(f"{file.name} does not match its sha256")
