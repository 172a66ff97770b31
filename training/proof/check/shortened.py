"""A workload shortened to a few steps per stage, which reports the points it reaches.

The stages are the workload's own, but see only the first samples, for a few epochs with an odd last
batch. What the loop relies on is checked on the way.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from training.engine.stage_checks import checked_order, samples_of
from training.errors import UserError
from training.proxies import PrepareProxy, TrainProxy, WorkloadProxy
from training.workload import (
    Batch,
    Inputs,
    Loss,
    Order,
    Partial,
    Prepare,
    Samples,
    Settings,
    Train,
    Workload,
)

NUM_EPOCHS = 2
_FULL_STEPS = 3
STEPS_PER_EPOCH = _FULL_STEPS + 1
# Where a stage of steps ends: in the last epoch that one of epochs has.
_MID_EPOCH = NUM_EPOCHS * STEPS_PER_EPOCH - 1

# stage, what was reached ("step", "evaluation", "shard"), number from 0
Reached = Callable[[str, str, int], None]


class Shortened(WorkloadProxy):
    """The workload `inner`, shortened; calls `reached` at every point where it may be interrupted.

    Stages have two epochs, one of steps all but the last step of them, or what `num_steps` needs.
    """

    def __init__(
        self, inner: Workload[Any], reached: Reached, num_steps: int | None = None
    ) -> None:
        super().__init__(inner)
        self._reached = reached
        self._num_steps = num_steps

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [
            _ShortenedTrain(stage, self._reached, self._num_steps)
            if isinstance(stage, Train)
            else _ShortenedPrepare(stage, self._reached)
            for stage in self._inner.stages(c)
        ]


class _ShortenedPrepare(PrepareProxy):
    def __init__(self, inner: Prepare, reached: Reached) -> None:
        super().__init__(inner)
        self._reached = reached

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        self._reached(self.name, "shard", shard)
        return super().make(i, shard)


class _ShortenedTrain(TrainProxy):
    def __init__(self, inner: Train, reached: Reached, num_steps: int | None) -> None:
        super().__init__(inner)
        self._reached = reached
        self._num_steps = num_steps
        self._num_batches = 0

    @property
    def settings(self) -> Settings:
        own = self._inner.settings
        if own.evaluate_every_steps:
            own = replace(own, evaluate_every_steps=min(own.evaluate_every_steps, _FULL_STEPS))
        if own.steps is not None:
            return replace(own, steps=self._num_steps or min(own.steps, _MID_EPOCH))
        if self._num_steps is not None:
            return replace(own, epochs=math.ceil(self._num_steps / STEPS_PER_EPOCH))
        return replace(own, epochs=min(own.epochs or 1, NUM_EPOCHS))

    def samples(self, i: Inputs, split: str) -> Samples:
        # Checked here: behind a proxy nobody would see it.
        inner = samples_of(self._inner, i, split)
        count = min(len(inner), num_samples(self.settings)) if split == "train" else len(inner)
        return _FewSamples(inner, count, f"stage {self.name!r}, split {split!r}")

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        self._reached(self.name, "step", step)
        return super().loss(m, b, step, num_steps)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        self._reached(self.name, "evaluation", self._num_batches)
        self._num_batches += 1
        return super().evaluate(m, b)


def num_samples(settings: Settings) -> int:
    """Samples for three whole steps and an odd one per epoch; no additional micro-batch of 1."""
    if settings.global_batch > settings.micro_batch:
        return _FULL_STEPS * settings.global_batch + settings.micro_batch
    return _FULL_STEPS * settings.global_batch + max(2, settings.global_batch // 2)


@dataclass(frozen=True, slots=True)
class _FewSamples(Samples):
    """The first samples of a set, with checks of what the loop relies on."""

    inner: Samples
    count: int
    what: str

    def __len__(self) -> int:
        return self.count

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        state = rng.get_state()
        item = self.inner.get(index, epoch, rng)
        if index < 2:  # two are enough to find samples that are not a function of the generator
            again = self.inner.get(index, epoch, _generator(state))
            if not _equal(item, again):
                raise UserError(
                    f"{self.what}: get({index}, rng) returns different samples for the same state "
                    "of rng; draw from rng alone, not from global generators"
                )
        return item

    def order(self, epoch: int, seed: int) -> Order:
        order = checked_order(self.inner, epoch, seed, twice=True)
        return order[order < self.count]


# The methods themselves: the loop and the loader look whether the samples have their own.
setattr(_FewSamples, "collate", property(lambda few: few.inner.collate))  # noqa: B010
setattr(_FewSamples, "files", property(lambda few: few.inner.files))  # noqa: B010


def _generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _equal(a: Any, b: Any) -> bool:
    (leaves_a, spec_a), (leaves_b, spec_b) = tree_flatten(a), tree_flatten(b)
    if spec_a != spec_b:
        return False
    pairs = zip(leaves_a, leaves_b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else bool(x == y) for x, y in pairs)
