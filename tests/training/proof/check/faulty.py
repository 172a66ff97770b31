"""The tiny workload with three Train stages, each time with one mistake in one of them."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.tiny import Doubled, Rows, Tiny, TinyConfig, TinyTrain, tiny_config
from training.engine.job import TrainProxy, WorkloadProxy
from training.workload import Batch, Inputs, Loss, Prepare, Train, Workload

STAGES = ("first", "second", "third")


class Three(Tiny):
    """Three Train stages, which go through their samples once."""

    @property
    def recipes(self) -> Mapping[str, Any]:
        return {"once": lambda: tiny_config(epochs=1)}

    def stages(self, c: TinyConfig) -> Sequence[Prepare | Train]:
        return (*super().stages(c), TinyTrain(config=c, name="third", width=8))


class Wide(Tiny):
    """One stage, with tensors on which torch uses all of its threads."""

    def stages(self, c: TinyConfig) -> Sequence[Prepare | Train]:
        doubled, *_ = super().stages(c)
        return [doubled, TinyTrain(config=c, name="wide", width=2**13, epochs=1)]


class Faulty(WorkloadProxy):
    """Three with one Train stage wrapped."""

    def __init__(self, wrap: type[TrainProxy], stage: str) -> None:
        super().__init__(THREE)
        self._wrap = wrap
        self._stage = stage

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [
            self._wrap(stage) if isinstance(stage, Train) and stage.name == self._stage else stage
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


class Miscounting(Rows):
    files = ("x.safetensors",)  # type: ignore[assignment]


class Miscounted(TrainProxy):
    def samples(self, i: Inputs, split: str) -> Rows:
        rows = super().samples(i, split)
        assert isinstance(rows, Rows)
        return Miscounting(rows._x)


THREE, WIDE = Three(), Wide()
REMEMBERING = Faulty(Remembering, "third")
TIMED = Faulty(Timed, "second")
AUGMENTED = Faulty(Augmented, "first")
MISCOUNTED = Faulty(Miscounted, "third")


class Doubling(Tiny):
    """Two Prepare stages with one key."""

    def stages(self, c: TinyConfig) -> Sequence[Prepare | Train]:
        doubled, *trained = super().stages(c)
        assert isinstance(doubled, Doubled)
        return (doubled, replace(doubled, name="again"), *trained)


class BadConfig(Tiny):
    recipes = {"quick": lambda: {"seed": 1}}  # type: ignore[assignment]  # noqa: RUF012


class HalfTrain(Train):
    name = "half"
    settings = TinyTrain(config=TinyConfig(), name="x", width=2).settings

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)


class Half(Tiny):
    placement_fields = frozenset({"seed", "loaders"})

    def stages(self, c: TinyConfig) -> Sequence[Any]:
        return [HalfTrain(), *super().stages(c)]


class Nothing(Workload[TinyConfig]):
    name = "nothing"


class Duck:
    name = "duck"


BAD_CONFIG, NOTHING, DOUBLING, DUCK = BadConfig(), Nothing(), Doubling(), Duck()
HALF = Half()
