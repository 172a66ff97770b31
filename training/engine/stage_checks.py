"""Checks of what a stage's methods return against the protocol, where the loop uses it.

A wrong result is refused in one sentence with the method's name; otherwise it would end in a
traceback from torch or JSON far from the wrong line, or train nothing.
"""

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from contract.errors import UserError
from training.durable import misfit
from training.settings import field_places, recorded
from training.workload import (
    Inputs,
    Loss,
    Partial,
    Prepare,
    Rung,
    Samples,
    Settings,
    Start,
    Train,
    Workload,
    implements,
)


def samples_of(stage: Train, i: Inputs, split: str) -> Samples:
    """Call `Train.samples` and check what it returns."""
    samples: Any = stage.samples(i, split)
    for sentence in _unlike(samples, Samples, f"stage {stage.name!r}, split {split!r}"):
        raise UserError(sentence)
    return samples  # type: ignore[no-any-return]


def _unlike(thing: Any, base: type[Any], what: str) -> Iterator[str]:
    """Yield how `thing` differs from `base`: what it lacks, or what the loop could not call."""
    if not isinstance(thing, base):
        yield (
            f"{what} is of class {type(thing).__name__}, which does not subclass "
            f"training.{base.__name__}: class {type(thing).__name__}({base.__name__})"
        )
        return
    for name, member in vars(base).items():
        if inspect.isfunction(member) and (name in base.REQUIRED or not name.startswith("_")):
            parameters = ", ".join(_parameters(member))
            if name in base.REQUIRED and not implements(thing, member):
                yield f"{what} has no {name}({parameters}): {inspect.getdoc(member)}"
            elif not _takes(getattr(thing, name), member):
                yield f"{what}: {name} must take ({parameters})"
    for name in base.REQUIRED:
        if not hasattr(thing, name):
            yield f"{what} has no {name}; see training.{base.__name__}"


def _takes(method: Any, like: Callable[..., Any]) -> bool:
    if not callable(method):
        return False
    count = len(_parameters(like))
    function = getattr(method, "__func__", None)
    if inspect.isfunction(function):  # which takes the object first
        return _fits(function, count + 1)
    return _fits.__wrapped__(method, count)


@functools.cache
def _fits(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


@functools.cache
def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters)[1:]


def checked_start(stage: Train, start: Any) -> Start:
    """Check the result of `Train.start`."""
    if not isinstance(start, Start):
        raise _wrong(stage, "start", start, "training.Start, or Start() if nothing failed")
    return start


def checked_numerics(stage: Train, chosen: Any) -> dict[str, str]:
    """Check the result of `Train.numerics`, which is kept as JSON and compared."""
    if not isinstance(chosen, Mapping):
        raise _wrong(stage, "numerics", chosen, "a mapping of what is chosen to the choice")
    for name, value in chosen.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UserError(
                f"stage {stage.name!r}: numerics returned {_described(value)} as {name!r}; "
                "return strings, which can be compared in later attempts"
            )
    return dict(chosen)


def loadable_state(model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return a new model's state, without its memory, and the names of buffers that are NaN.

    A buffer that repeats elements gets memory for each: a load writes every one.
    """
    state, unset = model.state_dict(keep_vars=True), []
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and not is_lazy(tensor):
            if 0 in tensor.stride():
                tensor.data = tensor.data.contiguous()
            values = tensor if tensor.is_complex() else tensor.float()
            if not tensor.requires_grad and values.isnan().any():
                unset.append(name)
            state[name] = tensor.detach().to("meta")
    return state, unset


def extra_state(
    stage: Train, model: nn.Module, built: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what get_extra_state returned that is no tensor, for a checkpoint's JSON.

    UserError if a model built like this one could not load its state.
    """
    problems = misfit(built, state)
    extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    for name, value in extra.items():
        own, is_json = model.get_submodule(name.rpartition(".")[0]), False
        with suppress(TypeError, ValueError):
            is_json = json.loads(json.dumps(value)) == value
        if not is_json or type(own).set_extra_state is nn.Module.set_extra_state:
            problems = (
                f"{name} is a {type(value).__name__}: let get_extra_state return a tensor or text, "
                "numbers, and lists and dicts of them by name, and let set_extra_state take it"
            )
    if problems:
        raise UserError(
            f"stage {stage.name!r} trains but could not resume, as its model's state is not what a "
            f"new model can load ({problems}); let model() register all of it in its final shapes, "
            "or with persistent=False if it need not be kept"
        )
    return extra


def checked_optimizer(stage: Train, optimizer: Any, model: nn.Module) -> Optimizer:
    """Check the result of `Train.optimizer`: it must change the model that the run saves."""
    if not isinstance(optimizer, Optimizer):
        raise _wrong(stage, "optimizer", optimizer, "a torch.optim.Optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(number not in own for number in given)
    if foreign or not given:
        what = f"{foreign} of {len(given)} are not the model's" if given else "none at all"
        raise UserError(
            f"stage {stage.name!r}: the optimizer was given the wrong parameters ({what}); pass it "
            "those of the model that optimizer(m) is called with: m.parameters()"
        )
    if callable(getattr(optimizer, "eval", None)):
        raise UserError(
            f"stage {stage.name!r}: {type(optimizer).__name__} keeps the weights to evaluate apart "
            "from those it trains (eval() and train()), and evaluations and exports would get the "
            "latter; use another optimizer, with Settings(ema_decay=...) for averaged weights"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"stage {stage.name!r}: {type(optimizer).__name__}.step needs a closure that computes "
            "the loss again, but a step here computes it once; return an optimizer that needs none"
        )
    return optimizer


def checked_loss(stage: Train, loss: Any) -> Loss:
    """Check the result of `Train.loss`; cheap, because it runs for every micro-batch."""
    if not isinstance(loss, Loss):
        raise _wrong(stage, "loss", loss, "training.Loss(total=...)")
    total, mean = loss.total, loss.mean
    if not isinstance(total, Tensor) or total.ndim or not total.requires_grad:
        raise UserError(
            f"stage {stage.name!r}: loss returned a total that is {_described(total)}; return a "
            "differentiable scalar, the sum over what `weight` counts (reduction='sum')"
        )
    if mean is not None and (not isinstance(mean, Tensor) or mean.ndim):
        raise UserError(
            f"stage {stage.name!r}: loss returned as mean {_described(mean)}; return a scalar"
        )
    for name, pair in loss.metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UserError(
                f"stage {stage.name!r}: the loss's metric {name!r} is {_described(pair)}; return a "
                "pair (sum, count), which can be summed over micro-batches and ranks"
            )
    return loss


def checked_weight(stage: Train, weight: Any, step: int) -> float:
    """Check the weight of a step's whole batch, by which its loss is divided."""
    if not isinstance(weight, int | float):
        raise _wrong(stage, "weight", weight, "a float that needs no device: float(len(labels))")
    if not 0 <= weight < math.inf:
        raise UserError(
            f"stage {stage.name!r}: the batches of step {step + 1} have the total weight {weight}, "
            "by which their loss is divided; return what `loss` sums over, 0 if there is nothing"
        )
    return weight


def checked_partial(stage: Train, partial: Any) -> Partial:
    """Check the result of `Train.evaluate`."""
    if not isinstance(partial, Partial):
        raise _wrong(stage, "evaluate", partial, "training.Partial(sums=..., tensors=...)")
    return partial


def checked_metrics(stage: Train, metrics: Any) -> dict[str, float]:
    """Check the result of `Train.summarize` and convert it to plain numbers."""
    if not isinstance(metrics, Mapping):
        raise _wrong(stage, "summarize", metrics, "a mapping of names to numbers")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"stage {stage.name!r}: summarize returned {_described(value)} as {name!r}; "
                "return one number for each name"
            ) from error
    return found


def checked_order(samples: Samples, epoch: int, seed: int, *, twice: bool) -> NDArray[np.int64]:
    """Check the result of `Samples.order`: each index once, or samples are lost or repeated."""
    order, count = _indices(samples, epoch, seed), len(samples)
    if not _is_permutation(order, count):
        raise UserError(
            f"split 'train': order({epoch}, {seed}) does not return each of {count} indices "
            "exactly once; use Samples.order(self, epoch, seed), and never change "
            "the number of samples"
        )
    if twice and not np.array_equal(_indices(samples, epoch, seed), order):
        raise UserError(
            f"split 'train': order({epoch}, {seed}) returns another order each time; it must be a "
            "function of epoch and seed: use Samples.order(self, epoch, seed)"
        )
    return order.astype(np.int64, copy=False)


def _indices(samples: Samples, epoch: int, seed: int) -> NDArray[Any]:
    """Return a copy: the array that `order` returned may be the workload's own, and change."""
    order: Any = samples.order(epoch, seed)
    return np.array(order.numpy(force=True) if isinstance(order, Tensor) else order)


def _is_permutation(order: NDArray[Any], count: int) -> bool:
    if order.shape != (count,) or order.dtype.kind not in "iu":
        return False
    seen = np.zeros(count, bool)
    seen[order[(order >= 0) & (order < count)]] = True
    return bool(seen.all())


def _wrong(stage: Train, method: str, given: Any, wanted: str) -> UserError:
    return UserError(
        f"stage {stage.name!r}: {method} returned {_described(given)}; return {wanted}"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        grad = f" with requires_grad={value.requires_grad}"
        return f"a tensor of shape {tuple(value.shape)}{grad}"
    return "None" if value is None else f"a {type(value).__name__}"


_CONFIG_FIELDS = {"seed": int, "num_threads": int, "deterministic": bool}


def problems(workload: Any) -> list[str]:
    """Return the problems as sentences; empty if there are none."""
    if lacks := list(_unlike(workload, Workload, "the workload")):
        return lacks
    if not isinstance(workload.recipes, Mapping) or not workload.recipes:
        return [
            "recipes must be a mapping with at least one recipe -> function that makes a config"
        ]
    found = []
    if not isinstance(workload.placement_fields, frozenset):
        found.append("placement_fields must be a frozenset of names of config fields")
    for recipe, make in workload.recipes.items():
        # The next recipe usually has the same problems.
        found = found or [f"recipe {recipe!r}: {text}" for text in _recipe(workload, make)]
    return found


def _recipe(workload: Any, make: Callable[[], Any]) -> Iterator[str]:
    config = make()
    if wrong := list(_config(config)):
        yield from wrong
        return
    if unknown := set(workload.placement_fields) - field_places(config).keys():
        yield f"placement_fields names {', '.join(sorted(unknown))}, which the config lacks"
    if recorded(make()) != recorded(config):
        yield "two calls return different configs; a recipe must be a constant"
    stages = workload.stages(config)
    yield from _stages(stages)
    if [stage.name for stage in workload.stages(config)] != [stage.name for stage in stages]:
        yield "two calls of stages(config) return different stages; it must be a function of config"
    for rung in workload.rungs(config):
        if not isinstance(rung, Rung):
            yield f"rungs(config) returns a {type(rung).__name__}; return training.Rung"
        elif type(rung.apply(config)) is not type(config):
            yield f"rung {rung.name!r} must return a {type(config).__name__}"


def _config(config: Any) -> Iterator[str]:
    if not dataclasses.is_dataclass(config):
        yield f"the config is a {type(config).__name__}; make it a frozen dataclass"
        return
    if not getattr(type(config), "__dataclass_params__").frozen:  # noqa: B009
        yield "the config's dataclass is not frozen; write @dataclass(frozen=True)"
    for name, kind in _CONFIG_FIELDS.items():
        if type(getattr(config, name, None)) is not kind:
            yield f"the config has no field {name}: {kind.__name__}"


def _stages(stages: Sequence[Any]) -> Iterator[str]:
    names = [getattr(stage, "name", None) for stage in stages]
    if len(set(names)) != len(names):
        yield f"the stages are named {names}; names must differ"
    for stage in stages:
        kind = Train if isinstance(stage, Train) or not hasattr(stage, "make") else Prepare
        yield from _unlike(stage, kind, f"stage {getattr(stage, 'name', stage)!r}")
        settings = getattr(stage, "settings", None)
        if kind is Train and settings is not None and not isinstance(settings, Settings):
            yield f"stage {stage.name!r}: settings is a {type(settings).__name__}; return Settings"
    if not any(isinstance(stage, Train) for stage in stages):
        yield "no stage trains; at least one must subclass training.Train"
