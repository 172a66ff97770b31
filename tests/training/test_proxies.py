"""A proxy offers what its workload or stage offers, and nothing else."""

from tests.training.tiny import TINY, Tiny, TinyConfig
from training.engine.job import TrainProxy, WorkloadProxy
from training.workload import Train, Workload, implements


def test_what_a_stage_implements_its_proxy_does() -> None:
    stage = TINY.stages(TinyConfig())[1]
    assert isinstance(stage, Train)
    proxy = TrainProxy(TrainProxy(stage))
    for method in (Train.sharded_modules, Train.predict, Train.example):
        assert implements(stage, method) and implements(proxy, method)
    assert not implements(proxy, Train.usual) and not implements(stage, Train.usual)
    assert len(proxy.example(3)["x"]) == 3
    assert (proxy.name, proxy.settings) == (stage.name, stage.settings)


def test_a_proxy_that_overrides_a_method_implements_it() -> None:
    class Shown(TrainProxy):
        def usual(self, size: int) -> object:
            return super().usual(size - 1)

    stage = TINY.stages(TinyConfig())[1]
    assert implements(Shown(stage), Train.usual)
    assert len(Shown(stage).usual(3)["x"]) == 2  # type: ignore[index]


def test_a_workload_s_proxy_is_one_too() -> None:
    proxy = WorkloadProxy(Tiny())
    assert proxy.nominal_samples == TINY.nominal_samples
    assert implements(proxy, Workload.make_dataset)
    assert not implements(proxy, Workload.check_data)
