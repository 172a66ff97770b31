"""A small dataset, made once, and the inputs of stages on it."""

import fcntl
import gc
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

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


@pytest.fixture(scope="module", autouse=True)
def _no_frames_are_left() -> Iterator[None]:
    """PyAV's cycles hold FFmpeg's threads, which a fork lacks: collecting them there hangs it."""
    yield
    gc.collect()


@pytest.fixture(scope="package")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> FakeDataset:
    """66 clips: six of each class."""
    path = tmp_path_factory.mktemp("dataset")
    make_dataset(path, COUNT, 0, lambda done, total: None, num_workers=1)
    return FakeDataset(folder=path)


@pytest.fixture(scope="package")
def inputs(dataset: FakeDataset, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """The laptop recipe, with its artifacts in four shards."""
    config = replace(laptop(), num_shards=4)
    stages = (Features(config=config), MeanImages(config=config), Tracks(config=config))
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers, of which the first makes them
    with (folder / "trajectory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "trajectory.pt"
        if not made.exists():
            without = inputs_of(dataset, config)
            shards = {each.name: [each.make(without, n) for n in range(4)] for each in stages}
            torch.save(shards, made)
    return inputs_of(dataset, config, torch.load(made))
