"""The tiny workload under an optimizer whose moments have a type of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.training.tiny import Tiny
from training.engine.job import TrainProxy, WorkloadProxy
from training.workload import Prepare, Train


class HalfMomentum(Optimizer):
    """SGD whose momentum is kept and computed in bfloat16."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                momentum = state["momentum"]
                momentum.mul_(0.9).add_(parameter.grad.to(momentum.dtype))
                parameter.add_(momentum.to(parameter.dtype), alpha=-group["lr"])


class Halved(TrainProxy):
    def optimizer(self, m: nn.Module) -> Optimizer:
        return HalfMomentum(m.parameters(), lr=0.01)


class Moments(WorkloadProxy):
    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [Halved(s) if isinstance(s, Train) else s for s in self._inner.stages(c)]


MOMENTS = Moments(Tiny())
