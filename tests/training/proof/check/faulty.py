"""The tiny workload, each time with one mistake that a person makes."""

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.tiny import Rows, Tiny, TinyConfig, TinyTrain
from training.proxies import TrainProxy, WorkloadProxy
from training.workload import Batch, Inputs, Loss, Prepare, Train


class Faulty(WorkloadProxy):
    """The tiny workload with every Train stage wrapped."""

    def __init__(self, stage: type[TrainProxy]) -> None:
        super().__init__(Tiny())
        self._stage = stage

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [
            self._stage(stage) if isinstance(stage, Train) else stage
            for stage in self._inner.stages(c)
        ]


class Counter(nn.Module):
    """Counts its calls in an attribute that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + 0.01 * self.calls)


class Remembering(TrainProxy):
    def model(self, i: Inputs) -> nn.Module:
        return nn.Sequential(*super().model(i), Counter())


class Timed(TrainProxy):
    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        loss = super().loss(m, b, step, num_steps)
        return Loss(total=loss.total * (1 + 1e-3 * (time.monotonic_ns() % 1000)))


class GloballyAugmented(Rows):
    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        x, y = super().get(index, epoch, rng)
        return x + random.random(), y


class Augmented(TrainProxy):
    def samples(self, i: Inputs, split: str) -> Rows:
        rows = super().samples(i, split)
        assert isinstance(rows, Rows)
        return GloballyAugmented(rows._x)


class Unordered(Rows):
    def order(self, epoch: int, seed: int) -> Sequence[int]:
        return torch.randint(len(self), (len(self),)).tolist()


class Repeating(TrainProxy):
    def samples(self, i: Inputs, split: str) -> Rows:
        rows = super().samples(i, split)
        assert isinstance(rows, Rows)
        return Unordered(rows._x)


class Averaging(TrainProxy):
    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        return Loss(total=super().loss(m, b, step, num_steps).total.detach())


REMEMBERING = Faulty(Remembering)
TIMED = Faulty(Timed)
AUGMENTED = Faulty(Augmented)
REPEATING = Faulty(Repeating)
DETACHED = Faulty(Averaging)


class BadConfig(Tiny):
    recipes = {"quick": lambda: {"seed": 1}}  # type: ignore[assignment]  # noqa: RUF012


class HalfTrain:
    name = "half"
    settings = TinyTrain(config=TinyConfig(), name="x", width=2).settings

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)


class Half(Tiny):
    def stages(self, c: TinyConfig) -> Sequence[Any]:
        return [HalfTrain(), *super().stages(c)]


class Nothing:
    name = "nothing"


BAD_CONFIG, NOTHING = BadConfig(), Nothing()
HALF = Half(placement_fields=frozenset({"seed", "loaders"}))
