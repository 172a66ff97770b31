"""A language model of milliseconds in float64, and its growth, for the tests of this folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training.workloads.expansion import Layout, clip_grad_norm, observe, scaled_groups
from training.workloads.expansion.verify import _Observation
from training.workloads.growth.config import (
    Activation,
    Block,
    DenseBlock,
    ExpertBlock,
    ModelConfig,
    Norm,
)
from training.workloads.growth.model import LanguageModel
from training.workloads.growth.transitions import _ROUTER, growth_layout

VOCABULARY, WIDTH, HEADS, HIDDEN, EXPERTS, TOP_K = 29, 12, 2, 20, 4, 2
DENSE, SPARSE = DenseBlock(hidden=HIDDEN), ExpertBlock(hidden=HIDDEN, num_experts=EXPERTS)


def times(factor: int) -> dict[str, int]:
    """Everything so many times as wide."""
    return {"width": factor, "heads": factor, "hidden": factor}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of model."""

    norm: Norm = "layer"
    activation: Activation = "gelu"
    is_tied: bool = True

    @property
    def layout(self) -> Layout:
        return growth_layout(is_tied=self.is_tied)

    def model(self, blocks: Sequence[Block], factor: int = 1, seed: int = 0) -> LanguageModel:
        """A model whose weights, biases and norms are large enough to matter, all of them."""
        config = ModelConfig(
            vocab_size=VOCABULARY,
            width=factor * WIDTH,
            num_heads=factor * HEADS,
            blocks=tuple(replace(own, hidden=factor * own.hidden) for own in blocks),
            norm=self.norm,
            activation=self.activation,
            is_tied=self.is_tied,
        )
        torch.manual_seed(seed)
        model = LanguageModel(config, initialize=False).double()
        with torch.no_grad():
            for name, own in model.named_parameters():
                own.normal_(mean=1.0 if "norm.weight" in name else 0.0, std=0.3)
        return model


KINDS = [
    Kind(norm=norm, activation=activation, is_tied=is_tied)
    for norm in ("layer", "rms")
    for activation in ("gelu", "swiglu")
    for is_tied in (True, False)
]


def tokens(num: int = 4, seed: int = 0) -> Tensor:
    """Texts of the vocabulary, (num, 9)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (num, 9), generator=generator)


def seen(model: LanguageModel, origins: Sequence[int | None] | None = None) -> _Observation:
    """What the model computes on the probe."""
    ids = tokens(16, seed=99)
    has_experts = any(isinstance(block, ExpertBlock) for block in model.config.blocks)
    return observe(
        model,
        lambda: model(ids[:, :-1]),
        ids[:, 1:],
        router=_ROUTER if has_experts else None,
        origins=origins,
    )


def adamw(
    model: nn.Module,
    layout: Layout,
    factors: Mapping[str, int],
    kind: Callable[..., Optimizer] = AdamW,
) -> Optimizer:
    """AdamW with weight decay and the rates of a model widened by `factors`."""
    named = model.named_parameters()
    return kind(scaled_groups(named, layout, factors, lr=1e-2, weight_decay=0.1))


def train(
    model: LanguageModel, optimizer: Optimizer, steps: range, clip: Callable[[], Any] = lambda: None
) -> list[float]:
    """The losses of these steps, whose batches depend on their numbers alone."""
    losses = []
    for step in steps:
        ids = tokens(seed=step)
        found = model.loss(ids[:, :-1], ids[:, 1:])
        loss = found.total / ids[:, 1:].numel() + 0.01 * found.balance
        optimizer.zero_grad()
        loss.backward()
        clip()
        optimizer.step()
        losses.append(loss.item())
    return losses


def clipping(
    model: nn.Module, layout: Layout, factor: int, max_norm: float
) -> Callable[[], Tensor]:
    """Clip the model's gradients as the model of factor 1 would have its own."""
    return lambda: clip_grad_norm(model.named_parameters(), layout, times(factor), max_norm)
