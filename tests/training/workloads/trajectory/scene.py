"""A dataset folder, the inputs of stages on it, and stages ready to train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.workload import Inputs, Prior, Train
from training.workloads.trajectory.config import TrajectoryConfig
from training.workloads.trajectory.model import TrainClipClassifier
from training.workloads.trajectory.trajectory_workload import TRAJECTORY

NO_RANDOMNESS = torch.Generator()
COUNT = 66


@dataclass(frozen=True)
class FakeDataset:
    """A dataset folder without its manifest."""

    folder: Path
    fingerprint: str = "one"
    manifest: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def file(self, name: str) -> Path:
        return self.folder / name


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


def train_stage(config: TrajectoryConfig, name: str) -> TrainClipClassifier:
    (stage,) = [s for s in TRAJECTORY.stages(config) if s.name == name]
    assert isinstance(stage, TrainClipClassifier)
    return stage


def started(stage: TrainClipClassifier, inputs: Inputs) -> torch.nn.Module:
    torch.manual_seed(0)
    assert isinstance(stage, Train)
    model = stage.model(inputs)
    assert not stage.start(model, inputs).failures
    return model


def batch_of(stage: TrainClipClassifier, inputs: Inputs, size: int) -> dict[str, Tensor]:
    samples = stage.samples(inputs, "train")
    return samples.collate([samples.get(k, 0, NO_RANDOMNESS) for k in range(size)])
