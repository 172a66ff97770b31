"""The tiny workload with a third stage, and in each as much ballast as tells in a process's memory.

Three Train stages whose state has the same size: parameters, and two moments of AdamW.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.tiny import Tiny, TinyConfig, TinyTrain
from training.engine.job import TrainProxy, WorkloadProxy
from training.workload import Inputs, Prepare, Train

# Blocks above 32 MB that needed new memory are given back at once when they are freed.
NUM_FLOATS = 10_000_000
STATE_BYTES = 3 * 4 * NUM_FLOATS


class Ballast(nn.Module):
    """Parameters that change no result; the loss has their norm, and so they have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_FLOATS))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Laden(TrainProxy):
    def model(self, i: Inputs) -> nn.Module:
        return nn.Sequential(*super().model(i), Ballast())  # type: ignore[misc]


class Heavy(WorkloadProxy):
    def stages(self, c: TinyConfig) -> Sequence[Prepare | Train]:
        *before, second = self._inner.stages(c)
        third = TinyTrain(config=c, name="third", width=8)
        trained: list[Any] = [*before, second, third]
        return [Laden(stage) if isinstance(stage, Train) else stage for stage in trained]


HEAVY = Heavy(Tiny())
