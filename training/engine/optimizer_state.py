"""Creates and loads an optimizer's state, whose types are the optimizer's own business."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Make the optimizer create all state that a step creates, so that it can be filled in place.

    It takes a step with zero gradients: which state there is, and how it is sharded, is its own
    business. The values, and those of the weights, are to be overwritten.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state_dict; each tensor comes back in the type it was saved in.

    `Optimizer.load_state_dict` casts all but `step` to the parameter's type: moments in bfloat16
    would come back in float32, and moments in float32 of a bfloat16 parameter rounded.
    """
    optimizer.load_state_dict(dict(saved))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, own in saved["state"].items():
        state = optimizer.state[parameters[number]]
        for name, value in own.items():
            state[name] = _uncast(state[name], value)


def _uncast(loaded: Any, saved: Any) -> Any:
    """What was loaded, where it was put, but with the saved tensors where a type has changed."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _uncast(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_uncast(a, b) for a, b in zip(loaded, saved, strict=True))
    return loaded
