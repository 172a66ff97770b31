"""A small MAGVIT recipe, and its stages on the small dataset."""

from dataclasses import replace

import torch

from training.workload import Prior
from training.workloads.trajectory.config import MagvitConfig, magvit_laptop
from training.workloads.trajectory.magvit.model import TrainTransformer
from training.workloads.trajectory.magvit.stages import Tokenizer
from training.workloads.trajectory.trajectory_workload import TRAJECTORY

SMALL = replace(magvit_laptop(), tokenizer_width=8, width=16, num_layers=1, num_heads=2)


def transformer_stage(config: MagvitConfig) -> TrainTransformer:
    (stage,) = [s for s in TRAJECTORY.stages(config) if s.name == "transformer"]
    assert isinstance(stage, TrainTransformer)
    return stage


def prior_of(config: MagvitConfig, seed: int = 0) -> Prior:
    torch.manual_seed(seed)
    model = Tokenizer(
        stem=config.stem, width=config.tokenizer_width, levels=config.num_levels
    ).state_dict()
    return Prior(stage="tokenizer", step=1, model=model, metrics={}, optimizer=dict)
