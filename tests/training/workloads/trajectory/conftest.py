"""A small dataset, made once, and the inputs of stages on it."""

import os
from dataclasses import replace

import pytest

from tests.training.workloads.trajectory.scene import COUNT, FakeDataset, inputs_of
from training.workload import Inputs
from training.workloads.trajectory.clip_dataset import make_dataset
from training.workloads.trajectory.config import laptop
from training.workloads.trajectory.features import Features, MeanImages
from training.workloads.trajectory.trajectory_workload import Tracks


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few clips are drawn and decoded here: processes take longer to start; commands have them."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.fixture(scope="package")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> FakeDataset:
    """66 clips: six of each class."""
    path = tmp_path_factory.mktemp("dataset")
    make_dataset(path, COUNT, 0, lambda done, total: None, num_workers=1)
    return FakeDataset(folder=path)


@pytest.fixture(scope="package")
def inputs(dataset: FakeDataset) -> Inputs:
    """The laptop recipe, with its artifacts in four shards."""
    config = replace(laptop(), num_shards=4)
    without = inputs_of(dataset, config)
    stages = (Features(config=config), MeanImages(config=config), Tracks(config=config))
    artifacts = {stage.name: [stage.make(without, shard) for shard in range(4)] for stage in stages}
    return inputs_of(dataset, config, artifacts)
