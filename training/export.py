"""The deliverable, final/model.safetensors, and the hash that two runs' weights are compared by."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.store import Store

FINAL = "final/model.safetensors"


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over sorted names, dtypes, shapes and raw little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        header = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(json.dumps(header).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def export_final(
    store: Store, tensors: Mapping[str, Tensor], about: Mapping[str, str], scratch: Path
) -> str:
    """Write the final weights into the run; return their hash."""
    digest = weights_sha256(tensors)
    path = scratch / "final.safetensors"
    scratch.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata={**about, "weights_sha256": digest})
    store.put_file(FINAL, path)
    path.unlink()
    return digest
