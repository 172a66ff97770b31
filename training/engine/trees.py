"""Nested containers of tensors: batches moved to a device, state_dicts split from their JSON."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from training.workload import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a pytree; on the CPU nothing is touched."""
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


def shapes_of(batch: Batch) -> Hashable:
    """What two batches have in common that the same kernels can compute."""
    if isinstance(batch, Tensor):
        return batch.shape
    if isinstance(batch, Mapping):
        return tuple(shapes_of(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return tuple(shapes_of(value) for value in batch)
    return None


def take_apart(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Split a state_dict of any depth: tensors go to `tensors`, the JSON skeleton is returned."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[k, take_apart(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        parts = [take_apart(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
        return {type(value).__name__: parts}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{path}: a {type(value).__name__} cannot be kept in a checkpoint")


def put_together(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `take_apart`."""
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: put_together(value, tensors) for key, value in content}
    if kind in ("list", "tuple"):
        parts = [put_together(value, tensors) for value in content]
        return tuple(parts) if kind == "tuple" else parts
    return content
