"""The functions of safetensors.torch that the trainer uses."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.stand_in.safetensors import safe_open
from training.durable import lay_out


def load_file(path: Path | str) -> dict[str, Tensor]:
    """Return all tensors of a file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def save_file(
    tensors: Mapping[str, Tensor], path: Path | str, metadata: Mapping[str, str] | None = None
) -> None:
    """Write these tensors to a file."""
    layout = lay_out(tensors, metadata)
    with Path(path).open("wb") as file:
        file.write(layout.header)
        for span in layout.spans:
            tensor = tensors[span.name].detach().contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
