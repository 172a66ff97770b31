"""Tiny's dataset under a model whose activations grow with the micro-batch: 36 MiB a sample.

Its rungs are of every kind, in the ladder's order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from tests.training.tiny import TINY, Rows
from training.rungs import micro_batch_rungs
from training.workload import (
    Batch,
    Inputs,
    Loss,
    Partial,
    Prepare,
    Progress,
    Rung,
    Samples,
    Settings,
    Train,
    Workload,
)

LENGTH = 2**19  # floats of one sample: 2 MiB
NUM_LAYERS = 6
BATCH = 8
SETTINGS = Settings(epochs=1, global_batch=BATCH, micro_batch=BATCH, eval_batch=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BigConfig:
    seed: int = 0
    num_threads: int = 1
    deterministic: bool = True
    settings: Settings = SETTINGS
    has_batch_norm: bool = False
    keeps_activations: bool = True
    has_momentum: bool = True
    has_all_rungs: bool = True


class Layers(nn.Module):
    """Multiplies a long sample by a number, again and again; each result is kept for backward."""

    def __init__(self, config: BigConfig) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.full((NUM_LAYERS,), 0.9))
        self.norm = nn.BatchNorm1d(1) if config.has_batch_norm else nn.Identity()
        self._keeps = config.keeps_activations

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.expand(-1, 1, LENGTH))
        for scale in self.scales:
            x = (
                _layer(x, scale)
                if self._keeps
                else checkpoint(_layer, x, scale, use_reentrant=False)
            )
        return x.mean(dim=(1, 2))


def _layer(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(torch.sin(x * scale))


class Numbers(Rows):
    """The first of the tiny dataset's features, as they are."""

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Tensor:
        return self._x[index, :1].view(1, 1)

    collate = Samples.collate


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrink(Train):
    config: BigConfig
    name: str = "shrink"

    @property
    def settings(self) -> Settings:
        return self.config.settings

    def example(self, size: int) -> Batch:
        return torch.ones(size, 1, 1)

    def model(self, i: Inputs) -> nn.Module:
        return Layers(self.config)

    def optimizer(self, m: nn.Module) -> Optimizer:
        make = AdamW if self.config.has_momentum else SGD
        return make(m.parameters(), lr=1e-3)

    def samples(self, i: Inputs, split: str) -> Numbers:
        x = load_file(i.dataset.folder / "x.safetensors")["x"]
        return Numbers(x[:BATCH] if split == "train" else x[BATCH:])

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        return Loss(total=m(b).square().sum())

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        return Partial(sums={"mean": (m(b).sum().item(), float(len(b)))})


class Big(Workload[BigConfig]):
    name = "big"

    @property
    def recipes(self) -> Mapping[str, Callable[[], BigConfig]]:
        return {"plain": BigConfig, "normed": lambda: BigConfig(has_batch_norm=True)}

    def stages(self, c: BigConfig) -> Sequence[Prepare | Train]:
        return (Shrink(config=c),)

    def rungs(self, c: BigConfig) -> Sequence[Rung]:
        if not c.has_all_rungs:
            return micro_batch_rungs(c)
        return [
            Rung(name="optimizer sgd", apply=lambda c: replace(c, has_momentum=False)),
            Rung(name="activations again", apply=lambda c: replace(c, keeps_activations=False)),
            *micro_batch_rungs(c),
        ]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return TINY.make_dataset(out, count, seed, progress)


BIG = Big()
