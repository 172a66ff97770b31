"""A workload that says what it is doing, and is otherwise the one that it wraps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from training.torture.watch import Watch
from training.workload import (
    Batch,
    Inputs,
    Loss,
    Partial,
    Prepare,
    Samples,
    Settings,
    Start,
    Train,
    Workload,
)


def watched(workload: Workload[Any], watch: Watch) -> Workload[Any]:
    """The workload, its stages watched."""
    return cast(Workload[Any], _Watched(workload, watch))


class _Passing:
    """Whatever is not defined here is the wrapped one's."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Watched(_Passing):
    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [
            _WatchedPrepare(stage, self._watch)
            if isinstance(stage, Prepare)
            else _WatchedTrain(stage, self._watch)
            for stage in self._inner.stages(c)
        ]


# A protocol's members must be found on the class itself, not by __getattr__ (Python 3.12 and on).
class _WatchedPrepare(_Passing):
    @property
    def name(self) -> str:
        return str(self._inner.name)

    @property
    def num_shards(self) -> int:
        return int(self._inner.num_shards)

    def key(self, i: Inputs) -> str:
        return str(self._inner.key(i))

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        with self._watch.doing("preparation"):
            made: Mapping[str, Tensor] = self._inner.make(i, shard)
            return made


class _WatchedTrain(_Passing):
    _inner: Train

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def settings(self) -> Settings:
        return self._inner.settings

    def model(self, i: Inputs) -> nn.Module:
        return self._inner.model(i)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        with self._watch.doing("start of a stage"):
            return self._inner.start(m, i)

    def optimizer(self, m: nn.Module) -> Optimizer:
        return self._inner.optimizer(m)

    def samples(self, i: Inputs, split: str) -> Samples:
        return self._inner.samples(i, split)

    def weight(self, b: Batch) -> float:
        return self._inner.weight(b)

    def loss(self, m: nn.Module, b: Batch, step: int) -> Loss:
        with self._watch.doing("step"):
            return self._inner.loss(m, b, step)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        with self._watch.doing("evaluation"):
            return self._inner.evaluate(m, b)

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        return self._inner.summarize(parts, out)
