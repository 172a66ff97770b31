"""A proxy offers what its workload or stage offers, and nothing else."""

import inspect

from tests.training.tiny import TINY, Tiny, TinyConfig
from training.capabilities import HasExample, HasNominalSamples, HasPredict, HasProbe, HasShards
from training.proxies import TrainProxy, WorkloadProxy
from training.workload import Train


def test_what_a_stage_offers_besides_is_found_on_its_proxy_as_python_3_12_looks_for_it() -> None:
    stage = TINY.stages(TinyConfig())[1]
    assert isinstance(stage, Train)
    proxy = TrainProxy(TrainProxy(stage))
    for protocol, member in ((HasShards, "sharded_modules"), (HasPredict, "predict")):
        assert isinstance(proxy, protocol)
        inspect.getattr_static(proxy, member)
    assert isinstance(proxy, HasExample) and len(proxy.example(3)["x"]) == 3
    assert not isinstance(proxy, HasProbe)


def test_a_workload_s_proxy_is_one_too() -> None:
    proxy = WorkloadProxy(Tiny())
    assert isinstance(proxy, HasNominalSamples)
    inspect.getattr_static(proxy, "nominal_samples")
    assert proxy.nominal_samples == TINY.nominal_samples
