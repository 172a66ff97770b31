"""Tensors made one at a time, so a model grows without a second copy of itself in memory."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

# Parameter name -> name in its optimizer's state -> value, as the engine passes it.
OptimizerState: TypeAlias = Mapping[str, Mapping[str, Any]]


# The names of AdamW's moments in its state: the averages of gradients and of their squares.
FIRST_MOMENTS = ("exp_avg",)
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
REWARM = "rewarm"  # axis, parts, copies, steps, done, since: what a `Rewarming` optimizer reads


class OnDemand(Mapping[str, T]):
    """A mapping whose values are made whenever they are read, and never kept."""

    def __init__(self, makers: Mapping[str, Callable[[], T]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> T:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def by_part(tensor: Tensor, place: int, parts: int, copies: int = 1) -> Tensor:
    """View one axis as three: packed parts, copies within each, values within a copy."""
    view: Tensor = tensor.unflatten(place, (parts, copies, -1))  # type: ignore[no-untyped-call]
    return view


@torch.no_grad()
def fill(model: nn.Module, grown: Mapping[str, Tensor]) -> None:
    """Copy a grown state into a model one tensor at a time; `load_state_dict` would make all first.

    ValueError if the names are not the model's, before anything has changed, or if a shape is not.
    """
    own = model.state_dict()
    missing, unknown = own.keys() - grown.keys(), grown.keys() - own.keys()
    if missing or unknown:
        lacks = f"the grown state lacks {_some(missing)}" if missing else ""
        has = f"it has {_some(unknown)}, which the model lacks" if unknown else ""
        raise ValueError("; ".join(part for part in (lacks, has) if part))
    for name, target in own.items():
        tensor = grown[name]
        _check_shape(repr(name), tensor, target)
        target.copy_(tensor)


def check_adams(state: OptimizerState) -> None:
    """Raise ValueError unless it is an Adam's state, whose moments can grow."""
    known = {"step", *FIRST_MOMENTS, *SECOND_MOMENTS, REWARM}
    for name, values in state.items():
        if unknown := sorted(values.keys() - known):
            raise ValueError(
                f"the optimizer's state of {name!r} has {unknown[0]!r}: how it grows is known for "
                "Adam's moments only; omit the state, and the optimizer starts without it"
            )


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Mapping[str, Any]]:
    """Return the state of a live optimizer in the form that the functions here grow."""
    return {
        name: optimizer.state[parameter]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def set_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, state: OptimizerState
) -> None:
    """Make an optimizer without state start from this one; parameters not in it start empty.

    ValueError if a name or a shape is not the model's.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, own in state.items():
        if name not in parameters:
            raise ValueError(f"the state has {name!r}, but no parameter of the model has that name")
        for key in own.keys() & {*FIRST_MOMENTS, *SECOND_MOMENTS}:
            _check_shape(f"{key!r} of {name!r}", own[key], parameters[name])
        optimizer.state[parameters[name]] = {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()
        }


def _check_shape(what: str, grown: Tensor, target: Tensor) -> None:
    if grown.shape != target.shape:
        raise ValueError(
            f"{what} has grown to {tuple(grown.shape)}, but the model expects "
            f"{tuple(target.shape)}; does its config fit the factors?"
        )


def _some(names: set[str]) -> str:
    first = sorted(names)
    return f"{first[0]!r}" + (f" and {len(first) - 1} more" if len(first) > 1 else "")
