"""Numbers that follow from shapes, on their way to a GPU that is busy."""

from collections.abc import Sequence

import torch
from torch import Tensor


def constant(
    values: Sequence[float] | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of the numbers; from page-locked memory, whose copy the host does not wait for."""
    is_gpu = device.type == "cuda" and not torch.compiler.is_compiling()
    here = torch.tensor(values, dtype=dtype, pin_memory=is_gpu)
    return here.to(device, non_blocking=True)
