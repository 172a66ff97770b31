"""The growth workload's own models, trained as seed 001 describes: float32, AdamW, nothing saved.

python -m sizing model benchmarks.anchors.language:phase1 --precision float32 --steps 100
"""

from dataclasses import replace
from typing import Any, Literal, cast

from torch import Tensor, nn

from training import Batch
from training.workloads.growth.config import GrowthConfig, full, literal
from training.workloads.growth.growth_workload import TrainPhase
from training.workloads.growth.model import LanguageModel

Phase = Literal["dense", "experts", "grown"]


def phase1(samples: int) -> tuple[nn.Module, Batch, Any]:
    """Return the dense phase: 100.04 M parameters."""
    return _phase("dense", full(), samples)


def phase2(samples: int) -> tuple[nn.Module, Batch, Any]:
    """Return the phase with eight experts, two of them per token: 371.64 M."""
    return _phase("experts", full(), samples)


def phase3(samples: int) -> tuple[nn.Module, Batch, Any]:
    """Return the phase of twice the width and four more layers: 1,479.9 M, nearest to announced."""
    return _phase("grown", full(), samples)


def phase3_literal(samples: int) -> tuple[nn.Module, Batch, Any]:
    """Return the growth taken literally, with experts in every new layer: 2,155.8 M."""
    return _phase("grown", literal(), samples)


def _phase(name: Phase, recipe: GrowthConfig, samples: int) -> tuple[nn.Module, Batch, Any]:
    """Return a phase without the recipe's memory savers: no recomputation, no lean optimizer."""
    stage = TrainPhase(config=replace(recipe, recompute="none", lean_optimizer="none"), name=name)
    model = LanguageModel(stage.architecture)
    # Each expert gets the average number of tokens, as real routing depends on the data.
    model.compute_experts_by("balanced")
    return model, stage.example(samples), _loss


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens_BT: Tensor = batch["tokens"]
    found = cast(LanguageModel, model).loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
    return found.total / tokens_BT[:, 1:].numel() + found.balance
