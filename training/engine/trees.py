"""Nested containers of tensors: moved to a device, compared by shape, flattened for files."""

from collections.abc import Hashable, Mapping
from typing import Any

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


def flatten_state(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Move a nested state_dict's tensors into `tensors`; return the rest as a JSON skeleton."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[k, flatten_state(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        parts = [flatten_state(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
        return {type(value).__name__: parts}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{path}: a {type(value).__name__} cannot be stored in a checkpoint")


def unflatten_state(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the state_dict from the skeleton and tensors of `flatten_state`."""
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflatten_state(value, tensors) for key, value in content}
    if kind in ("list", "tuple"):
        parts = [unflatten_state(value, tensors) for value in content]
        return tuple(parts) if kind == "tuple" else parts
    return content
