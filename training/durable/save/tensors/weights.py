"""Weights of a run, of one of its checkpoints or of a file: to start from, evaluate or export.

The run's own deliverable is final/model.safetensors; the weights of runs are compared by one hash.
"""

import hashlib
import json
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from contract.errors import UserError
from contract.keys import FINAL, checkpoint_prefix
from training.durable.attempt.resume_point import DamagedCheckpointError, read_twice
from training.durable.record.head import CheckpointEntry
from training.durable.record.run import OpenRun
from training.durable.save.tensors.resume import (
    CheckpointContent,
    fill_slices,
    misfit,
    read_state,
    read_tensors,
    slices_of,
)
from training.durable.save.tensors.state import lay_out, tensor_at
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store, StoreError

# Files of weights: ours, and those that torch.save wrote.
_WEIGHT_FILES = (".safetensors", ".pth", ".pt")
# A placeholder for the hash in the header, of the same length, until all tensors are written.
_PLACEHOLDER = "?" * 64


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's state_dict on the CPU, and what is known about it."""

    tensors: Mapping[str, Tensor]
    about: Mapping[str, str]  # the file's metadata: run_id, workload, stage, step, metrics

    @cached_property
    def sha256(self) -> str:
        """The hash by which the weights of runs are compared."""
        return weights_sha256(self.tensors)

    @classmethod
    def read(cls, uri: str, checkpoint: str | None = None) -> "Weights":
        """Read those of a file, a finished run, or a run's checkpoint (`find_checkpoint`)."""
        with tempfile.TemporaryDirectory(prefix="weights-") as folder:
            if uri.endswith(_WEIGHT_FILES):
                if checkpoint is not None:
                    raise UserError(f"{uri} is a file, without checkpoints; pass a run's URI")
                return _from_file(uri, Path(folder))
            run = OpenRun.of_workload(uri)
            if checkpoint is not None:
                return _from_checkpoint(run, run.find_checkpoint(checkpoint))
            if run.head.state != "finished":
                raise UserError(
                    f"the run {run.store.uri} is {run.head.state}; only a finished run has final "
                    f"weights, so name one of its checkpoints: {run.choices}"
                )
            found = _fetch(run.store, FINAL, Path(folder))
            if found.sha256 != run.head.weights_sha256:
                raise StoreError(
                    f"{run.store.uri}/{FINAL} does not have the weights that the run finished "
                    "with; export its newest checkpoint instead"
                )
            return found

    def load_into(self, model: nn.Module, stage: str) -> None:
        """Copy the weights into the model of a stage; UserError names what does not fit."""
        if problems := misfit(model, self.tensors):
            raise UserError(f"the weights do not fit the model of stage {stage!r}: {problems}")
        model.load_state_dict(dict(self.tensors))


def _from_checkpoint(run: OpenRun, entry: CheckpointEntry) -> Weights:
    try:
        snapshot = CheckpointContent.read_weights(run.store, entry)
    except DamagedCheckpointError as error:
        raise UserError(f"checkpoint {entry.name} is damaged: {error}; use another one") from error
    position = snapshot.state["position"]
    tensors = snapshot.weights
    record = run.record
    about = {
        "run_id": record.run_id,
        "workload": record.workload,
        "recipe": record.recipe,
        "config": json.dumps(record.config),
        "metrics": json.dumps(position["metrics"]),
        "stage": entry.stage,
        "step": str(entry.step),
        "checkpoint": entry.name,
    }
    weights = Weights(tensors=tensors, about=about)
    about["weights_sha256"] = weights.sha256
    return weights


def _from_file(uri: str, folder: Path) -> Weights:
    parent, _, name = uri.rpartition("/")
    store = open_store(parent or ".")
    if name.endswith(".safetensors"):
        return _fetch(store, name, folder)
    path = folder / "weights.pth"
    try:
        store.get_file(name, path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{uri} does not exist; check the URI") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{uri} cannot be read as tensors alone ({str(error).splitlines()[0]:.80}); save the "
            "state dict as safetensors"
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    values = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(one, torch.Tensor) for one in values):
        raise UserError(
            f"{uri} is not a state dict and has none under 'model' or 'state_dict'; save only that"
        )
    return Weights(tensors=found, about={})


def _fetch(store: Store, key: str, folder: Path) -> Weights:
    path = folder / "weights.safetensors"
    try:
        store.get_file(key, path)
    except FileNotFoundError as error:
        raise UserError(f"{store.uri}/{key} does not exist; check the URI") from error
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            # Cloned: computing on memory at a file's own alignment changes the last bits.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{store.uri}/{key} is not a safetensors file: {error}") from error
    return Weights(tensors=tensors, about=about)


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over sorted names, dtypes, shapes and raw little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        header = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(json.dumps(header).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def export_final(
    store: Store, entry: CheckpointEntry, about: Mapping[str, str], scratch: Path
) -> str:
    """Write the weights of a checkpoint into the run as one file; return their hash.

    Files are read one by one, so no more than one rank's share of a sharded model is in memory. The
    moving average, if there is one, was evaluated and is exported.
    """
    prefix, files = checkpoint_prefix(entry.name), {file.name: file for file in entry.files}
    slices = slices_of(store, entry, read_state(store, entry))
    final = {**slices["model"], **slices.get("ema", {})}
    shapes = {
        name: torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]), device="meta")
        for name, one in final.items()
    }
    layout = lay_out(shapes, {**about, "weights_sha256": _PLACEHOLDER})
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "final.safetensors"
    with path.open("wb") as file:
        file.truncate(layout.size)
    block = torch.from_file(str(path), shared=True, size=layout.size, dtype=torch.uint8)
    tensors = {place.name: tensor_at(block, place) for place in layout.spans}

    def read(name: str) -> dict[str, Tensor]:
        return read_twice(entry, lambda: read_tensors(store, prefix, files[name]))

    fill_slices({"final": final}, {"final": tensors}, read)
    digest = weights_sha256(tensors)
    header = layout.header.replace(_PLACEHOLDER.encode(), digest.encode())
    block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    del tensors, block
    store.put_file(FINAL, path)
    path.unlink()
    return digest
