"""Batches as trees of tensors: moved to a device, compared by shape."""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from training.workload import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a pytree to the device; no-op on the CPU."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def tensor_shapes(batch: Batch) -> Hashable:
    """The shapes of all tensors, hashable: equal for batches that the same kernels can compute."""
    if isinstance(batch, Tensor):
        return batch.shape
    if isinstance(batch, Mapping):
        return tuple(tensor_shapes(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return tuple(tensor_shapes(value) for value in batch)
    return None
