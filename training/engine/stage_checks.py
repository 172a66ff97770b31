"""What a stage's methods answer, held against the protocol where the loop takes it.

A wrong answer is refused in one sentence with the method's name; otherwise it would end in a
traceback of torch or of JSON, far from the line that is wrong, or train to nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.errors import UserError
from training.workload import Loss, Partial, Samples, Start, Train


def checked_start(stage: Train, start: Any) -> Start:
    """What `Train.start` gave."""
    if not isinstance(start, Start):
        raise _wrong(stage, "start", start, "training.workload.Start; Start() if all is well")
    return start


def checked_optimizer(stage: Train, optimizer: Any, model: nn.Module) -> Optimizer:
    """What `Train.optimizer` gave: it must change the model that the run saves."""
    if not isinstance(optimizer, Optimizer):
        raise _wrong(stage, "optimizer", optimizer, "a torch.optim.Optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    strange = sum(number not in own for number in given)
    if strange or not given:
        what = f"{strange} of {len(given)} are not the model's" if given else "none at all"
        raise UserError(
            f"stage {stage.name!r}: the optimizer was given wrong parameters ({what}); give it "
            "those of the model that optimizer(m) is called with: m.parameters()"
        )
    return optimizer


def checked_loss(stage: Train, loss: Any) -> Loss:
    """What `Train.loss` gave for a micro-batch; cheap, because it is done for each."""
    if not isinstance(loss, Loss):
        raise _wrong(stage, "loss", loss, "training.workload.Loss(total=...)")
    total, mean = loss.total, loss.mean
    if not isinstance(total, Tensor) or total.ndim or not total.requires_grad:
        raise UserError(
            f"stage {stage.name!r}: loss gave a total that is {_described(total)}; give a "
            "differentiable scalar, the sum over what `weight` counts (reduction='sum')"
        )
    if mean is not None and (not isinstance(mean, Tensor) or mean.ndim):
        raise UserError(
            f"stage {stage.name!r}: loss gave a mean that is {_described(mean)}; give a scalar"
        )
    for name, pair in loss.metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UserError(
                f"stage {stage.name!r}: the loss's metric {name!r} is {_described(pair)}; give a "
                "pair (sum, count), which can be added up over micro-batches and ranks"
            )
    return loss


def checked_weight(stage: Train, weight: Any, step: int) -> float:
    """The weight of a step's whole batch, by which its loss is divided."""
    if not isinstance(weight, int | float):
        raise _wrong(stage, "weight", weight, "a float that needs no device: float(len(labels))")
    if not weight > 0:
        raise UserError(
            f"stage {stage.name!r}: all batches of step {step + 1} together have the weight "
            f"{weight}, by which their loss is divided; give what `loss` sums over, more than 0"
        )
    return weight


def checked_partial(stage: Train, partial: Any) -> Partial:
    """What `Train.evaluate` gave for a batch."""
    if not isinstance(partial, Partial):
        raise _wrong(stage, "evaluate", partial, "training.workload.Partial(sums=..., tensors=...)")
    return partial


def checked_metrics(stage: Train, metrics: Any) -> dict[str, float]:
    """What `Train.summarize` gave, as plain numbers."""
    if not isinstance(metrics, Mapping):
        raise _wrong(stage, "summarize", metrics, "a mapping of names to numbers")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"stage {stage.name!r}: summarize gave as {name!r} {_described(value)}; give one "
                "number for each name"
            ) from error
    return found


def checked_order(samples: Samples, epoch: int, seed: int, *, twice: bool) -> list[int]:
    """What `Samples.order` gave: each index once, or samples would be lost or seen twice."""
    order, count = _indices(samples, epoch, seed), len(samples)
    if order.shape != (count,) or not torch.equal(order.sort().values, torch.arange(count)):
        raise UserError(
            f"split 'train': order({epoch}, {seed}) does not give each of {count} indices exactly "
            "once; use training.randomness.shuffled(len, epoch, seed), and let the number of "
            "samples never change"
        )
    if twice and not torch.equal(_indices(samples, epoch, seed), order):
        raise UserError(
            f"split 'train': order({epoch}, {seed}) gives another order each time; it must be a "
            "function of epoch and seed: use training.randomness.shuffled(len, epoch, seed)"
        )
    found: list[int] = order.tolist()
    return found


def _indices(samples: Samples, epoch: int, seed: int) -> Tensor:
    order = samples.order(epoch, seed)
    return torch.as_tensor(order if isinstance(order, Tensor) else list(order)).long()


def _wrong(stage: Train, method: str, given: Any, wanted: str) -> UserError:
    return UserError(f"stage {stage.name!r}: {method} gave {_described(given)}; give {wanted}")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        grad = f" with requires_grad={value.requires_grad}"
        return f"a tensor of shape {tuple(value.shape)}{grad}"
    return "None" if value is None else f"a {type(value).__name__}"
