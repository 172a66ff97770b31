"""A small dataset, made once, and the inputs of stages on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training.trajectory.dataset import make_dataset
from training.trajectory.features import Features
from training.trajectory.mean_images import MeanImages
from training.trajectory.recipes import laptop
from training.workload import Inputs, Prior

COUNT = 66


@dataclass(frozen=True)
class FakeDataset:
    """A dataset folder without its manifest."""

    folder: Path
    fingerprint: str = "one"
    manifest: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


def inputs_of(
    dataset: FakeDataset,
    config: Any,
    artifacts: Mapping[str, Sequence[Mapping[str, Tensor]]] | None = None,
    prior: Prior | None = None,
) -> Inputs:
    """What a stage is given."""
    return Inputs(
        config=config,
        dataset=dataset,
        artifact=lambda name: (artifacts or {})[name],
        prior=prior,
        device=torch.device("cpu"),
        rank=0,
        world=1,
        seed=config.seed,
        scratch=dataset.folder,
    )


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
    stages = (Features(config=config), MeanImages(num_shards=4))
    artifacts = {stage.name: [stage.make(without, shard) for shard in range(4)] for stage in stages}
    return inputs_of(dataset, config, artifacts)
