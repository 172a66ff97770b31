"""A workload's stages behind proxies: they report their phases, and may be shortened.

Shortened stages see only the first samples, for a few epochs with an odd last batch; what the loop
relies on is checked on the way.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from contract.errors import UserError
from training import (
    Batch,
    Inputs,
    Loss,
    Order,
    Partial,
    Prepare,
    PrepareProxy,
    Restaged,
    Samples,
    Settings,
    Start,
    Train,
    TrainProxy,
    Workload,
    checked_order,
    samples_of,
)
from training.proof.injector import Injector

_NUM_EPOCHS = 2
_FULL_STEPS = 3
_STEPS_PER_EPOCH = _FULL_STEPS + 1
# A stage measured in steps ends here, in the last epoch of a stage measured in epochs.
_MID_EPOCH = _NUM_EPOCHS * _STEPS_PER_EPOCH - 1


def observed(workload: Workload[Any], injector: Injector) -> Workload[Any]:
    """Return the workload, reporting the phases of its stages to the injector."""

    def proxy(stage: Prepare | Train) -> Prepare | Train:
        if isinstance(stage, Train):
            return _ObservedTrain(stage, injector)
        return _ObservedPrepare(stage, injector)

    return Restaged(workload, lambda c: [proxy(stage) for stage in workload.stages(c)])


def shortened(workload: Workload[Any], num_steps: int | None = None) -> Workload[Any]:
    """Return the workload with its stages shortened to two epochs each.

    A stage measured in steps gets all but the last step of these; all get what `num_steps` needs.
    """

    def proxy(stage: Prepare | Train) -> Prepare | Train:
        return _ShortenedTrain(stage, num_steps) if isinstance(stage, Train) else stage

    return Restaged(workload, lambda c: [proxy(stage) for stage in workload.stages(c)])


class _ObservedPrepare(PrepareProxy):
    def __init__(self, inner: Prepare, injector: Injector) -> None:
        super().__init__(inner)
        self._injector = injector

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        with self._injector.doing("preparation", self.name, shard + 1):
            return super().make(i, shard)


class _ObservedTrain(TrainProxy):
    def __init__(self, inner: Train, injector: Injector) -> None:
        super().__init__(inner)
        self._injector = injector
        self._num_batches = 0

    def start(self, m: nn.Module, i: Inputs) -> Start:
        with self._injector.doing("start of a stage", self.name):
            return super().start(m, i)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        with self._injector.doing("step", self.name, step + 1):
            return super().loss(m, b, step, num_steps)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        self._num_batches += 1
        with self._injector.doing("evaluation", self.name, self._num_batches):
            return super().evaluate(m, b)


class _ShortenedTrain(TrainProxy):
    def __init__(self, inner: Train, num_steps: int | None) -> None:
        super().__init__(inner)
        self._num_steps = num_steps

    @property
    def settings(self) -> Settings:
        own = self._inner.settings
        if own.evaluate_every_steps:
            own = replace(own, evaluate_every_steps=min(own.evaluate_every_steps, _FULL_STEPS))
        if own.steps is not None:
            return replace(own, steps=self._num_steps or min(own.steps, _MID_EPOCH))
        if self._num_steps is not None:
            return replace(own, epochs=math.ceil(self._num_steps / _STEPS_PER_EPOCH))
        return replace(own, epochs=min(own.epochs or 1, _NUM_EPOCHS))

    def samples(self, i: Inputs, split: str) -> Samples:
        # Checked here, as the loop's checks would see only the proxy.
        inner = samples_of(self._inner, i, split)
        count = min(len(inner), _num_samples(self.settings)) if split == "train" else len(inner)
        return _FewSamples(inner, count, f"stage {self.name!r}, split {split!r}")


def _num_samples(settings: Settings) -> int:
    """Return the samples for three full steps and an odd one per epoch, without a batch of one."""
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
                    "of rng. Code that draws from the generators of torch, numpy or random, like "
                    "torchvision's transforms, goes below `with drawing_from(rng):` (from training "
                    "import drawing_from), or the dataset into a training.DatasetSamples"
                )
        return item

    def order(self, epoch: int, seed: int) -> Order:
        order = checked_order(self.inner, epoch, seed, twice=True)
        return order[order < self.count]


# The inner methods themselves: the loop and the loader check whether the samples have their own.
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
