"""An optimizer's state by parameter name: recorded, read back from a checkpoint, started from.

torch numbers the parameters in the order of the optimizer's groups; a checkpoint has the names that
belong to the numbers, so that another model's optimizer can start from the state.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from training.errors import UserError
from training.save.read import CheckpointContent
from training.save.state import unflatten_state
from training.workload import OptimizerState, Train

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
