"""Which implementation of deformable attention a machine computes with."""

from typing import Literal, TypeAlias

import torch

Implementation: TypeAlias = Literal["triton", "compiled", "reference", "deterministic"]


def choose(device: torch.device, dtype: torch.dtype, deterministic: bool) -> Implementation:
    """The fastest that works here; the same bits every time if that is asked for."""
    return "deterministic" if deterministic and device.type == "cuda" else "reference"
