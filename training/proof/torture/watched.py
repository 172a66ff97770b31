"""A workload that says what it is doing, and is otherwise the one that it wraps."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from training.proof.torture.watch import Watch
from training.proxies import PrepareProxy, TrainProxy, WorkloadProxy
from training.workload import Batch, Inputs, Loss, Partial, Prepare, Start, Train, Workload


def watched(workload: Workload[Any], watch: Watch) -> Workload[Any]:
    """The workload, its stages watched."""
    return cast(Workload[Any], _Watched(workload, watch))


class _Watched(WorkloadProxy):
    def __init__(self, inner: Workload[Any], watch: Watch) -> None:
        super().__init__(inner)
        self._watch = watch

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [
            _WatchedPrepare(stage, self._watch)
            if isinstance(stage, Prepare)
            else _WatchedTrain(stage, self._watch)
            for stage in self._inner.stages(c)
        ]


class _WatchedPrepare(PrepareProxy):
    def __init__(self, inner: Prepare, watch: Watch) -> None:
        super().__init__(inner)
        self._watch = watch

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        with self._watch.doing("preparation"):
            return super().make(i, shard)


class _WatchedTrain(TrainProxy):
    def __init__(self, inner: Train, watch: Watch) -> None:
        super().__init__(inner)
        self._watch = watch

    def start(self, m: nn.Module, i: Inputs) -> Start:
        with self._watch.doing("start of a stage"):
            return super().start(m, i)

    def loss(self, m: nn.Module, b: Batch, step: int) -> Loss:
        with self._watch.doing("step"):
            return super().loss(m, b, step)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        with self._watch.doing("evaluation"):
            return super().evaluate(m, b)
