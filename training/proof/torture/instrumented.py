"""A proxy of a workload that reports the phases of its stages."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from training.proof.torture.injector import Injector
from training.proxies import PrepareProxy, TrainProxy, WorkloadProxy
from training.workload import Batch, Inputs, Loss, Partial, Prepare, Start, Train, Workload


def instrumented(workload: Workload[Any], injector: Injector) -> Workload[Any]:
    """The workload with instrumented stages."""
    return cast(Workload[Any], _Instrumented(workload, injector))


class _Instrumented(WorkloadProxy):
    def __init__(self, inner: Workload[Any], injector: Injector) -> None:
        super().__init__(inner)
        self._injector = injector

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [
            _InstrumentedPrepare(stage, self._injector)
            if isinstance(stage, Prepare)
            else _InstrumentedTrain(stage, self._injector)
            for stage in self._inner.stages(c)
        ]


class _InstrumentedPrepare(PrepareProxy):
    def __init__(self, inner: Prepare, injector: Injector) -> None:
        super().__init__(inner)
        self._injector = injector

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        with self._injector.doing("preparation"):
            return super().make(i, shard)


class _InstrumentedTrain(TrainProxy):
    def __init__(self, inner: Train, injector: Injector) -> None:
        super().__init__(inner)
        self._injector = injector

    def start(self, m: nn.Module, i: Inputs) -> Start:
        with self._injector.doing("start of a stage"):
            return super().start(m, i)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        with self._injector.doing("step"):
            return super().loss(m, b, step, num_steps)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        with self._injector.doing("evaluation"):
            return super().evaluate(m, b)
