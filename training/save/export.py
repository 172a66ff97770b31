"""The deliverable, final/model.safetensors, and the hash by which runs' weights are compared."""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contract.keys import FINAL, checkpoint_prefix
from training.record.checkpoint_entry import CheckpointEntry, FileEntry
from training.record.newest_valid import DamagedCheckpointError
from training.save.layout import lay_out
from training.save.read import fill_slices, read_state, read_tensors
from training.save.sharded import slices_of
from training.save.state import tensor_at
from training.store.protocol import Store

# A placeholder for the hash in the header, of the same length, until all tensors are written.
_PLACEHOLDER = "?" * 64


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
    layout = lay_out({name: _empty(one) for name, one in final.items()}, _metadata(about))
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "final.safetensors"
    with path.open("wb") as file:
        file.truncate(layout.size)
    block = torch.from_file(str(path), shared=True, size=layout.size, dtype=torch.uint8)
    tensors = {place.name: tensor_at(block, place) for place in layout.spans}
    fill_slices({"final": final}, {"final": tensors}, partial(_read_twice, store, prefix, files))
    digest = weights_sha256(tensors)
    header = layout.header.replace(_PLACEHOLDER.encode(), digest.encode())
    block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    del tensors, block
    store.put_file(FINAL, path)
    path.unlink()
    return digest


def _metadata(about: Mapping[str, str]) -> dict[str, str]:
    return {**about, "weights_sha256": _PLACEHOLDER}


def _empty(about: Mapping[str, Any]) -> Tensor:
    return torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]), device="meta")


def _read_twice(
    store: Store, prefix: str, files: Mapping[str, FileEntry], name: str
) -> dict[str, Tensor]:
    """Read a file; once more if it fails its checksum, as it may have been damaged in transit."""
    try:
        return read_tensors(store, prefix, files[name])
    except DamagedCheckpointError:
        return read_tensors(store, prefix, files[name])
