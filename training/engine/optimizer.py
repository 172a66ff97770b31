"""An optimizer's state by parameter name, and what goes with it: loss scale and moving average.

torch numbers the parameters in the order of the optimizer's groups; a checkpoint records the names
for these numbers, so another model's optimizer can start from the state. Its tensors keep their
types, which are up to the optimizer.
"""

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from contract.errors import UserError
from training.durable import CheckpointContent, is_sharded
from training.settings import Precision
from training.workload import OptimizerState, Train


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def create_optimizer_state(optimizer: Optimizer, names: Collection[str]) -> None:
    """Make the optimizer create the state that a checkpoint names, so that it can be filled.

    It takes a step with zero gradients, as only the optimizer knows what state there is and how it
    is sharded. The caller must overwrite the values, including those of the weights.
    """
    numbers = {name.split("/")[2] for name in names if name.startswith("/state/")}
    for number, parameter in enumerate(_parameters(optimizer)):
        # Also one that still is frozen: the loss may unfreeze it at a step.
        if str(number) in numbers:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state_dict; each tensor comes back in the type it was saved in, laid out as created.

    A checkpoint's tensors are contiguous: next to gradients of channels-last convolutions they
    would cost foreach its fast path. State of a parameter's shape takes the parameter's strides.

    `Optimizer.load_state_dict` casts all but `step` to the parameter's type: moments in bfloat16
    would come back in float32, and moments in float32 of a bfloat16 parameter rounded.
    """
    optimizer.load_state_dict(dict(saved))
    parameters = _parameters(optimizer)
    for number, own in saved["state"].items():
        # Lookahead keeps its state in another optimizer; bitsandbytes' nests it when it saves.
        state = optimizer.state.get(parameters[number], {})
        for name in own.keys() & state.keys():
            state[name] = _laid_out(_uncast(state[name], own[name]), parameters[number])


def _laid_out(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or is_sharded(value):
        return value
    laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    return value if value.stride() == laid_out.stride() else laid_out.copy_(value)


def _uncast(loaded: Any, saved: Any) -> Any:
    """Return `loaded`, but with the saved tensors, on its device, where a type has changed."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _uncast(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_uncast(a, b) for a, b in zip(loaded, saved, strict=True))
    return loaded


OPTIMIZER = "optimizer"  # a checkpoint's part, and its skeleton in the checkpoint's JSON
OPTIMIZER_NAMES = "optimizer_names"  # in the checkpoint's JSON: number -> the parameter's names


def names_by_id(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter, which has several if modules share it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def parameter_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of each of the optimizer's parameters, in its order."""
    names = names_by_id(model)
    return [names[id(parameter)] for parameter in _parameters(optimizer)]


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
    """Set the state of an optimizer without any, in its own memory and on the right device."""
    names = iter(parameter_names(optimizer, model))
    places = {
        name: (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name in next(names)
    }
    if unknown := sorted(state.keys() - places.keys()):
        raise UserError(
            f"stage {stage.name!r}: start returned an optimizer state for {unknown[0]!r}, which is "
            f"not a parameter of its optimizer; use the model's names: {', '.join(places)[:80]}"
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
    """Step the optimizer as if it had only this parameter."""
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


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Scaling:
    """Scales the loss so that float16 gradients do not underflow; no-op for other precisions.

    A step whose gradients overflow is skipped: weights and optimizer stay, the scale is lowered.
    It is a step of the lineage like any other, and is repeated as such after an interruption.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._scaler = GradScaler(device.type, enabled=precision == "float16")
        # It begins with its first loss, and a rank may have no micro-batch in its first step.
        self._scaler.scale(torch.zeros((), device=device))

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the scaled loss."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(
        self, optimizer: Optimizer, model: nn.Module, clip_norm: float | None
    ) -> tuple[bool, Tensor | None]:
        """Clip gradients, step, adapt the scale.

        Return whether the step was skipped, and the norm of the gradients if they are clipped:
        clipping needs it anyway; otherwise it would cost another pass over them.
        """
        norm: Tensor | None = None
        if clip_norm is not None:
            # The optimizer's zero_grad would leave these, to add up and to count in the norm.
            for other in set(model.parameters()) - set(_parameters(optimizer)):
                other.grad = None
            self._scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if not self._scaler.is_enabled():
            optimizer.step()
            return False, norm
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() < before, norm

    def state(self) -> dict[str, Any]:
        """The state to keep in a checkpoint; empty if the loss is not scaled."""
        return self._scaler.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(state))


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The autocast context for every forward."""
    return torch.autocast(
        device.type, dtype=_DTYPES[precision], enabled=precision != "float32", cache_enabled=True
    )


class MovingAverage:
    """Averages parameters, and floating-point buffers if asked; the rest is as in the model."""

    def __init__(self, model: nn.Module, decay: float, *, with_buffers: bool = False) -> None:
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        named: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_floating_point() or parameter.is_complex():
                named[name] = parameter
                if parameter.requires_grad and 1 - decay < torch.finfo(parameter.dtype).eps:
                    raise UserError(
                        f"ema_decay is {decay}, but {name} is {parameter.dtype}, which rounds each "
                        "change of its average away; keep it in float32, or lower ema_decay"
                    )
        if with_buffers:
            saved = model.state_dict().keys()
            for name, buffer in model.named_buffers(remove_duplicate=False):
                if name in saved and buffer.is_floating_point():
                    named[name] = buffer
        self._tensors = list(dict.fromkeys(named.values()))
        self._averages = [tensor.detach().clone() for tensor in self._tensors]
        places = {id(tensor): place for place, tensor in enumerate(self._tensors)}
        # A shared tensor under each of its names, as in the model's state_dict.
        self._places = {name: places[id(tensor)] for name, tensor in named.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by name."""
        return {name: self._averages[place] for name, place in self._places.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the averages of a checkpoint."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    def update(self) -> None:
        """Update the averages after an optimizer step."""
        self._average(self._averages, self._tensors, 0)
        for average, tensor in zip(self._averages, self._tensors, strict=True):
            if not tensor.requires_grad:  # it may be infinite, as masks are: inf - inf is NaN
                average.copy_(torch.where(average.isnan(), tensor, average))

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model compute with the averages; only sharded parameters are copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for place, tensor in enumerate(self._tensors):
            average = self._averages[place]
            if is_sharded(tensor):
                # FSDP gathers from its own memory, of which the parameter is a view.
                mine, other = tensor.detach().to_local(), average.to_local()  # type: ignore[attr-defined]
                before = mine.clone()
                mine.copy_(other)
                other.copy_(before)
            else:
                tensor.data, self._averages[place] = average, tensor.data


def flatten_state(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Move a nested state_dict's tensors into `tensors`; return the rest as a JSON skeleton."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[k, flatten_state(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        parts = [flatten_state(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
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
    if kind in ("value", "dtype"):
        return content if kind == "value" else getattr(torch, content)
    parts = [unflatten_state(value, tensors) for value in content]
    return parts if kind == "list" else tuple(parts)  # once under its class's name: "Size"
