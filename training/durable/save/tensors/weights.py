"""The yield of a run for others: its weights, or its end, from which a new run goes on.

Weights are those of a run, of one of its checkpoints or of a file: to start from, evaluate or
export. The run's own deliverable is final/model.safetensors; the weights of runs are compared by
one hash.

As finished is final (its receipt was read), a new run extends it. Its head is created with copies
of the old one's last checkpoints, and a normal resume does the rest. From there the learning rate
follows the schedule of the longer training.
"""

import argparse
import hashlib
import json
import logging
import os
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from contract.errors import UserError
from contract.keys import CHECKPOINTS, FINAL, artifact_prefix, checkpoint_prefix
from training.durable.attempt.resume_point import DamagedCheckpointError, read_twice
from training.durable.record.head import CheckpointEntry, Head, new_nonce
from training.durable.record.run import OpenRun
from training.durable.save.tensors.resume import (
    CheckpointContent,
    fill_slices,
    misfit,
    read_state,
    read_tensors,
    slices_of,
)
from training.durable.save.tensors.state import STATE, lay_out, tensor_at
from training.durable.store.folder import open_store
from training.durable.store.protocol import PreconditionFailedError, Store, StoreError
from training.durable.store.transfer import put_text

# Files of weights: ours, and those that torch.save wrote.
_WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".pth.tar", ".bin", ".ckpt")
# Where a training program's file has the model, the average first, as timm's own loader takes it;
# and what compiling and DistributedDataParallel put before its names.
_STATES = ("state_dict_ema", "model_ema", "state_dict", "model")
_WRAPPERS = ("_orig_mod.", "module.", "_orig_mod.")
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
        state = {**self.tensors, **json.loads(self.about.get("extra", "{}"))}
        if problems := misfit(model.state_dict(), state):
            raise UserError(f"the weights do not fit the model of stage {stage!r}: {problems}")
        for buffer in model.buffers():
            if 0 in buffer.stride():  # one that repeats elements could not be written
                buffer.data = buffer.data.contiguous()
        model.load_state_dict(state)


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
        "extra": json.dumps(snapshot.state.get("extra", {})),
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
        # Options that torchvision's and timm's programs save along; neither runs any code.
        with torch.serialization.safe_globals([argparse.Namespace, PosixPath]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{uri} does not exist; check the URI") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{uri} cannot be read as tensors alone ({str(error).splitlines()[0]:.80}); save the "
            "state dict as safetensors"
        ) from error
    where = next((key for key in _STATES if isinstance(_entry(found, key), dict)), "")
    found = _unwrapped(found[where] if where else found)
    if not found or not all(isinstance(one, torch.Tensor) for one in found.values()):
        raise UserError(
            f"{uri} is not a state dict and has none under {', '.join(map(repr, _STATES))}; save "
            "only that"
        )
    if where in _STATES[:2]:
        _log.info("[weights] %s: %r, the moving average of its weights", uri, where)
    return Weights(tensors=found, about={})


def _entry(found: Any, key: str) -> Any:
    return found.get(key) if isinstance(found, dict) else None


def _unwrapped(state: Any) -> dict[str, Any]:
    """Drop what wrappers add to a state dict: prefixes, and an AveragedModel's counter."""
    named = {k: v for k, v in state.items() if k != "n_averaged"} if _is_named(state) else {}
    for prefix in _WRAPPERS:
        if named and all(name.startswith(prefix) for name in named):
            named = {name.removeprefix(prefix): value for name, value in named.items()}
    return named


def _is_named(state: Any) -> bool:
    return isinstance(state, dict) and all(isinstance(key, str) for key in state)


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
    state = read_state(store, entry)
    slices = slices_of(store, entry, state)
    extra = json.dumps(state.get("extra", {}))  # `Weights.load_into` reads it
    final = {**slices["model"], **slices.get("ema", {})}
    shapes = {
        name: torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]), device="meta")
        for name, one in final.items()
    }
    layout = lay_out(shapes, {**about, "extra": extra, "weights_sha256": _PLACEHOLDER})
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "final.safetensors"
    with path.open("w+b") as file:  # the C library reads it to allocate, where the disk cannot
        file.truncate(layout.size)
        if layout.size and hasattr(os, "posix_fallocate"):
            # Else a full disk is no error here, but a SIGBUS where the memory is written.
            os.posix_fallocate(file.fileno(), 0, layout.size)
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


_log = logging.getLogger(__name__)


class Extension:
    """The run of a workload that another one extends."""

    def __init__(self, run: OpenRun) -> None:
        self.run = run

    @property
    def end(self) -> CheckpointEntry:
        """The end of its last stage; UserError if it has not finished."""
        if self.run.head.state != "finished":
            raise UserError(
                f"the run {self.run.store.uri} is {self.run.head.state}; only a finished run can "
                "be extended"
            )
        return next(e for e in reversed(self.run.head.checkpoints) if e.kind == "stage-end")

    def begin(self, store: Store, run_id: str, writer: str) -> None:
        """Create the head of the new run at `store`; no-op if it has one from the same end."""
        run, end = self.run, self.end
        entries = []
        with tempfile.TemporaryDirectory(prefix="extend-") as folder:
            for entry in run.head.checkpoints:
                prefix = checkpoint_prefix(entry.name)
                if entry == end:
                    # Never their state: another machine may have begun this run and written its.
                    _copy(run.store, store, prefix, Path(folder), without=prefix + STATE)
                    entries.append(self._reopened(store))
                elif entry.kind == "stage-end" and entry.stage != end.stage:
                    _copy(run.store, store, prefix, Path(folder))
                    entries.append(entry)
            for key in self.state["position"]["artifacts"].values():
                _copy(run.store, store, artifact_prefix(key), Path(folder))
        head = Head(
            run_id=run_id,
            generation=0,
            writer=writer,
            nonce=new_nonce(),
            state="released",
            checkpoints=tuple(entries),
        )
        try:
            head.write(store, None)
        except PreconditionFailedError as error:
            # This attempt or an equal one may have created it.
            theirs = Head.read(store)
            if theirs is None or (theirs.generation == 0 and theirs.checkpoints != tuple(entries)):
                raise UserError(
                    f"the run {store.uri} does not start from the end of {run.store.uri}; extend "
                    "the run that it was begun for, or use another run URI"
                ) from error
            return
        # Copies from another extension that was killed: no takeover would sweep them.
        for name in store.folders(CHECKPOINTS) - {entry.name for entry in entries}:
            store.delete_below(checkpoint_prefix(name))
        _log.info(f"[ok] {store.uri} starts from the end of {run.store.uri}, step {end.step}")

    @cached_property
    def state(self) -> dict[str, Any]:
        """The JSON of that end's checkpoint."""
        store, end = self.run.store, self.end
        found = store.get(checkpoint_prefix(end.name) + STATE)
        if found is None:
            raise UserError(f"checkpoint {end.name} of {store.uri} lacks its {STATE}")
        state: dict[str, Any] = json.loads(found.data)
        return state

    def _reopened(self, store: Store) -> CheckpointEntry:
        """Turn the end of the stage into a boundary within it, by a state.json of its own."""
        end, position = self.end, self.state["position"]
        results = {n: found for n, found in position["results"].items() if n != end.stage}
        position = {**position, "has_ended": False, "results": results}
        state = json.dumps({**self.state, "position": position}).encode()
        mine = put_text(store, checkpoint_prefix(end.name), STATE, state)
        files = tuple(mine if file.name == STATE else file for file in end.files)
        return replace(end, kind="periodic", files=files)


def _copy(old: Store, new: Store, prefix: str, folder: Path, *, without: str = "") -> None:
    """Copy the keys below the prefix; JSON indexes last, as they promise that the rest exists."""
    keys = sorted(old.sizes(prefix).keys() - {without}, key=lambda key: key.endswith(".json"))
    for key in keys:
        path = folder / "file"
        old.get_file(key, path)
        new.put_file(key, path)
        path.unlink()
