"""Checkpoints of a model that is sharded over processes: each writes its slices, rank 0 publishes.

The slices are listed in the checkpoint's own JSON, so any number of processes can read them, each
its share; one process reads it like any other checkpoint. `commit_sharded` and `read_sharded` are
called by all ranks together.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from training.capture import STATE, Capture, LiveFile, Text
from training.checkpoint import checkpoint_name, fill_slices, find_nan, read_state
from training.entries import CheckpointEntry, FileEntry, Kind
from training.errors import RunFailedError
from training.position import Attempt, Position
from training.slices import SLICES, Slice, is_first_holder, local_slice
from training.store import Store, StoreError
from training.transfer import Progress, send


def commit_sharded(
    attempt: Attempt, capture: Capture, position: Position, epoch: int, kind: Kind
) -> None:
    """Write every rank's slices, then publish on rank 0; if one rank fails, all do."""
    world, began = attempt.world, time.monotonic()
    generation = attempt.generation if world.leads else 0
    name = world.share(checkpoint_name(position.step, generation))
    prefix = f"checkpoints/{name}/"
    files, slices, error = _write_mine(attempt.store, prefix, capture, world.rank)
    mine = json.dumps({"files": [asdict(f) for f in files], "slices": slices, "error": error})
    theirs = [json.loads(text) for text in world.gather(mine)]
    errors = [f"rank {rank}: {r['error']}" for rank, r in enumerate(theirs) if r["error"]]
    if errors:
        raise StoreError(f"{prefix} was not written: {errors[0]}")
    if world.leads:
        attempt.metrics.flush()
        written = tuple(FileEntry(**file) for record in theirs for file in record["files"])
        merged = _merge([record["slices"] for record in theirs], capture)
        state = {**capture.state, SLICES: merged}
        text = Text(name=STATE, data=json.dumps(state).encode())
        written += send(attempt.store, prefix, [text], torch.device("cpu"), Progress())
        entry = CheckpointEntry(
            name=name,
            step=position.step,
            stage=position.stage,
            epoch=epoch,
            kind=kind,
            files=written,
            is_best=position.best.get("step") == position.step,
        )
        attempt.lease.publish(entry, retention=attempt.retention)
        attempt.lease.delete_unkept()
        seconds = round(time.monotonic() - began, 4)
        attempt.events.emit("committed", "ok", step=position.step, kind=kind, seconds=seconds)
    # Nobody goes on before the checkpoint exists.
    world.share(None)


def read_sharded(
    store: Store, entry: CheckpointEntry, targets: Mapping[str, Mapping[str, Tensor]]
) -> Mapping[str, object]:
    """Fill this rank's share of every target in place; return the checkpoint's JSON."""
    state = read_state(store, entry)
    fill_slices(store, entry, state[SLICES], targets)
    return {name: value for name, value in state.items() if name != SLICES}


def _write_mine(
    store: Store, prefix: str, capture: Capture, rank: int
) -> tuple[tuple[FileEntry, ...], dict[str, dict[str, list[dict[str, object]]]], str | None]:
    """This rank's files and slices, or what went wrong: the others must hear of it."""
    slices: dict[str, dict[str, list[dict[str, object]]]] = {}
    contents = []
    try:
        for part, tensors in capture.tensors.items():
            mine: dict[str, Tensor] = {}
            file = f"{part}.rank-{rank:04d}"
            for name, tensor in tensors.items():
                offset, local = local_slice(tensor)
                if is_first_holder(tensor, rank) and (local.numel() or not tensor.numel()):
                    mine[name] = local
                    own = Slice(file=f"{file}.safetensors", offset=offset, shape=tuple(local.shape))
                    slices.setdefault(part, {})[name] = [asdict(own)]
            if part == "model" and (bad := find_nan(mine)) is not None:
                raise RunFailedError(f"{bad} holds a NaN; nothing was published")
            contents.append(LiveFile(file, mine))
        return send(store, prefix, contents, capture.device, Progress()), slices, None
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        return (), {}, str(error)


def _merge(
    records: list[dict[str, dict[str, list[dict[str, object]]]]], capture: Capture
) -> dict[str, dict[str, dict[str, object]]]:
    merged: dict[str, dict[str, dict[str, object]]] = {}
    for part, tensors in capture.tensors.items():
        merged[part] = {}
        for name, tensor in tensors.items():
            found = [own for record in records for own in record.get(part, {}).get(name, [])]
            merged[part][name] = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "slices": found,
            }
    return merged
