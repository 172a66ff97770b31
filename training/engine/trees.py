"""Batches as trees of tensors: moved to a device, compared by shape."""

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from training.workload import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a pytree to the device; no-op on the CPU."""
    if device.type == "cpu":
        return batch
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(batch: Batch) -> Batch:
    """Copy every tensor of a pytree on the CPU to page-locked memory."""
    return _mapped(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


def _mapped(batch: Batch, act: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        return act(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(value, act) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, act) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, act) for value in batch)
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
