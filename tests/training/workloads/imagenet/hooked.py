"""The imagenet workload at 32 pixels, in seconds; its steps call the tiny workload's hooks."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from tests.training import tiny
from training.engine.job import TrainProxy, WorkloadProxy
from training.settings import changed
from training.workload import Batch, Loss, Prepare, Train
from training.workloads.imagenet.config import ImagenetConfig, _laptop
from training.workloads.imagenet.imagenet_workload import IMAGENET


def small() -> ImagenetConfig:
    """The laptop recipe without its larger images, and with a shorter memory."""
    return changed(
        _laptop(), epochs=4, train_size=32, eval_size=32, ema_decay=0.9, evaluate_every_epochs=2
    )


class Classifier(TrainProxy):
    """The stage, which says at which step it is."""

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        tiny.HOOKS.get(self.name, lambda number: None)(step)
        return super().loss(m, b, step, num_steps)


class Hooked(WorkloadProxy):
    """All of the workload's own but for the recipe and the hooks."""

    recipes: ClassVar = {"small": small}

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [Classifier(stage) for stage in IMAGENET.stages(c)]


HOOKED = Hooked(IMAGENET)
