"""A state_dict of any depth as tensors by path, and a skeleton that JSON can hold."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


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
