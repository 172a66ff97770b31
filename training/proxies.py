"""Proxies of a workload and its stages: subclasses observe or change single methods.

A protocol's members, optional ones too, must be found on the class itself, not by __getattr__
(Python 3.12 and later).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from training.workload import Batch, Inputs, Loss, Partial, Prepare, Samples, Settings, Start, Train


class WorkloadProxy:
    """A workload that forwards every attribute not defined here to `inner`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        kind = type(self)
        found = [n for n in dir(inner) if not n.startswith("_") and not hasattr(kind, n)]
        self.__class__ = type(kind.__name__, (kind,), {n: _forwarded(n) for n in found})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _forwarded(name: str) -> property:
    return property(lambda proxy: getattr(proxy._inner, name))


class PrepareProxy(WorkloadProxy):
    """A Prepare stage that forwards to `inner`."""

    _inner: Prepare

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def num_shards(self) -> int:
        return self._inner.num_shards

    def key(self, i: Inputs) -> str:
        return self._inner.key(i)

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        return self._inner.make(i, shard)


class TrainProxy(WorkloadProxy):
    """A Train stage that forwards to `inner`."""

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
        return self._inner.start(m, i)

    def optimizer(self, m: nn.Module) -> Optimizer:
        return self._inner.optimizer(m)

    def samples(self, i: Inputs, split: str) -> Samples:
        return self._inner.samples(i, split)

    def weight(self, b: Batch) -> float:
        return self._inner.weight(b)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        return self._inner.loss(m, b, step, num_steps)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        return self._inner.evaluate(m, b)

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        return self._inner.summarize(parts, out)
