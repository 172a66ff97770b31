"""An optimizer's state: created, loaded, by parameter name, and stepped in backward if asked.

torch numbers the parameters in the order of the optimizer's groups; a checkpoint has the names that
belong to the numbers, so that another model's optimizer can start from the state. Its tensors keep
their types, which are the optimizer's own business.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.errors import UserError
from training.save.read import CheckpointContent
from training.save.slices import is_sharded
from training.save.state import unflatten_state
from training.workload import OptimizerState, Train


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
    """Load a state_dict; each tensor comes back in the type it was saved in, laid out as created.

    A checkpoint's tensors are contiguous: beside gradients of channels-last convolutions they would
    cost foreach its fast path. State of a parameter's shape takes the parameter's strides.

    `Optimizer.load_state_dict` casts all but `step` to the parameter's type: moments in bfloat16
    would come back in float32, and moments in float32 of a bfloat16 parameter rounded.
    """
    optimizer.load_state_dict(dict(saved))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, own in saved["state"].items():
        state = optimizer.state[parameters[number]]
        for name, value in own.items():
            state[name] = _laid_out(_uncast(state[name], value), parameters[number])


def _laid_out(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or is_sharded(value):
        return value
    laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    return value if value.stride() == laid_out.stride() else laid_out.copy_(value)


def _uncast(loaded: Any, saved: Any) -> Any:
    """What was loaded, where it was put, but with the saved tensors where a type has changed."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _uncast(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_uncast(a, b) for a, b in zip(loaded, saved, strict=True))
    return loaded


OPTIMIZER = "optimizer"  # a checkpoint's part, and its skeleton in the checkpoint's JSON
OPTIMIZER_NAMES = "optimizer_names"  # in the checkpoint's JSON: number -> the parameter's names


def parameter_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of each of the optimizer's parameters in its order; a shared one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def state_by_name(snapshot: CheckpointContent) -> OptimizerState:
    """The optimizer's state in a checkpoint of which at least that part was read."""
    tensors = snapshot.tensors.get(OPTIMIZER, {})
    state = unflatten_state(snapshot.state[OPTIMIZER], tensors)["state"]
    return {
        name: state[number]
        for number, names in enumerate(snapshot.state[OPTIMIZER_NAMES])
        for name in names
        if number in state
    }


def start_state(
    stage: Train, optimizer: Optimizer, model: nn.Module, state: OptimizerState
) -> None:
    """Give an optimizer without state this one, in memory of its own and on the right device."""
    names = iter(parameter_names(optimizer, model))
    places = {
        name: (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name in next(names)
    }
    if unknown := sorted(state.keys() - places.keys()):
        raise UserError(
            f"stage {stage.name!r}: start gave an optimizer state for {unknown[0]!r}, which is no "
            f"parameter of its optimizer; name them as the model does: {', '.join(places)[:80]}"
        )
    for name, own in state.items():
        parameter, group = places[name]
        optimizer.state[parameter] = {
            key: _placed(key, value, parameter, group) for key, value in own.items()
        }


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    # As in torch's load_state_dict: steps are counted on the host where no kernel reads them.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    # A copy: the stage may give several parameters, such as experts, the same tensor.
    return value.detach().to("cpu" if on_host else parameter.device, copy=True)


def step_in_backward(optimizer: Optimizer) -> None:
    """Let every backward step the optimizer, parameter by parameter."""
    # Weak: a parameter that held its optimizer would hold the whole stage after its end.
    of_all = weakref.ref(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda own, number=number: _step(of_all(), number, own)
                )


def _step(optimizer: Optimizer | None, number: int, parameter: Tensor) -> None:
    """Step the optimizer as if it had this parameter alone."""
    assert optimizer is not None
    groups = optimizer.param_groups
    group = groups[number]  # looked up here, as load_state_dict replaces the groups
    parameters = group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, group["params"] = groups, parameters
    parameter.grad = None
