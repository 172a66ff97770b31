"""The growth workload's own models, trained as seed 001 describes: float32, AdamW, nothing saved.

python -m sizing model benchmarks.anchors.language:phase1 --precision float32 --steps 100
"""

from dataclasses import replace
from typing import Any, Literal, cast

from torch import Tensor, nn

from training.workload import Batch
from training.workloads.growth.config import GrowthConfig, full, literal
from training.workloads.growth.model import LanguageModel
from training.workloads.growth.workload import TrainPhase

Phase = Literal["dense", "experts", "grown"]


def phase1(samples: int) -> tuple[nn.Module, Batch, Any]:
    """Dense: 100.04 M parameters."""
    return _phase("dense", full(), samples)


def phase2(samples: int) -> tuple[nn.Module, Batch, Any]:
    """Eight experts, two of them for each token: 371.64 M."""
    return _phase("experts", full(), samples)


def phase3(samples: int) -> tuple[nn.Module, Batch, Any]:
    """Twice the width and four layers more: 1,479.9 M, nearest to what was announced."""
    return _phase("grown", full(), samples)


def phase3_literal(samples: int) -> tuple[nn.Module, Batch, Any]:
    """The same growth to the letter, every new layer with experts: 2,155.8 M."""
    return _phase("grown", literal(), samples)


def _phase(name: Phase, recipe: GrowthConfig, samples: int) -> tuple[nn.Module, Batch, Any]:
    """A phase without what lets the recipe fit: no recomputation, no lean optimizer."""
    stage = TrainPhase(config=replace(recipe, recompute="none", lean_optimizer="none"), name=name)
    model = LanguageModel(stage.architecture)
    # Each expert gets the average number of tokens: which gets which depends on data.
    model.compute_experts_by("balanced")
    return model, stage.example(samples), _loss


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens_BT: Tensor = batch["tokens"]
    found = cast(LanguageModel, model).loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
    return found.total / tokens_BT[:, 1:].numel() + found.balance
