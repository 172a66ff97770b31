"""The growth workload in a size of seconds; its steps and starts call the tiny workload's hooks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from tests.training import tiny
from training.engine.job import TrainProxy, WorkloadProxy
from training.settings import changed
from training.workload import Batch, Inputs, Loss, Progress, Start, Train
from training.workloads.growth.config import GrowthConfig, laptop
from training.workloads.growth.growth_workload import GROWTH
from training.workloads.growth.text.text_dataset import TextOptions, make_dataset

STEPS = 6


def small() -> GrowthConfig:
    """A few thousand parameters that grow to some ten thousand."""
    return changed(
        laptop(),
        vocab_size=300,
        context=24,
        width=16,
        num_heads=2,
        num_layers=2,
        hidden=24,
        num_experts=4,
        new_layers=1,
        new_hidden=40,
        dense_steps=STEPS,
        experts_steps=STEPS,
        grown_steps=STEPS,
        global_batch=8,
        micro_batch=4,
        warmup_steps=2,
        evaluate_every_steps=4,
        eval_windows=6,
        num_shown=2,
        sample_tokens=5,
    )


class Phase(TrainProxy):
    """A phase that says where it is."""

    def start(self, m: nn.Module, i: Inputs) -> Start:
        tiny.HOOKS.get(f"{self.name}-start", lambda number: None)(0)
        return super().start(m, i)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        tiny.HOOKS.get(self.name, lambda number: None)(step)
        return super().loss(m, b, step, num_steps)


class Hooked(WorkloadProxy):
    """All of the workload's own but for the recipe and the hooks."""

    recipes: ClassVar = {"small": small}

    def stages(self, c: GrowthConfig) -> Sequence[Train]:
        return [Phase(stage) for stage in GROWTH.stages(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress, TextOptions(vocab_size=300))


HOOKED = Hooked(GROWTH)
