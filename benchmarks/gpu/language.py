"""A small language model under the engine's protocol: matrix products, attention, dropout.

B batch, T tokens, W width, H heads, V vocabulary. The text is arithmetic, so it needs no dataset.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training.rungs import micro_batch_rungs
from training.workload import (
    Inputs,
    Loss,
    Partial,
    Progress,
    Rung,
    Samples,
    Settings,
    Train,
    Workload,
)

_HEAD_WIDTH = 64
_NUM_HELD_OUT = 40

Batch = dict[str, Tensor]
SETTINGS = Settings(
    epochs=1, global_batch=32, micro_batch=32, eval_batch=16, clip_norm=1.0, precision="bfloat16"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageConfig:
    """About 27 million parameters, and every setting whose price or exactness is measured."""

    seed: int = 0
    num_threads: int = 2
    deterministic: bool = False
    width: int = 512
    num_layers: int = 6
    num_tokens: int = 256
    vocabulary: int = 8192
    steps: int = 60
    settings: Settings = SETTINGS
    fused: bool = False
    ema: bool = False


class _LanguageBlock(nn.Module):
    """Causal attention and a feed-forward layer, pre-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // _HEAD_WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x_BTW: Tensor) -> Tensor:
        size, length, width = x_BTW.shape
        heads = (size, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = self.qkv(self.norms[0](x_BTW)).view(heads).permute(2, 0, 3, 1, 4).unbind(0)
        x_BHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTW = x_BTW + self.dropout(self.out(x_BHTd.transpose(1, 2).reshape(x_BTW.shape)))
        out: Tensor = x_BTW + self.dropout(self.feed(self.norms[1](x_BTW)))
        return out


def build(c: LanguageConfig) -> nn.Module:
    """Token numbers (B, T) to logits (B, T, V)."""
    blocks = [_LanguageBlock(c.width) for _ in range(c.num_layers)]
    head = nn.Linear(c.width, c.vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(c.vocabulary, c.width), *blocks, nn.LayerNorm(c.width), head)


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows(Samples):
    """Texts that count in sevens from a random token."""

    config: LanguageConfig
    count: int

    def __len__(self) -> int:
        return self.count

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Tensor:
        first = torch.randint(self.config.vocabulary, (1,), generator=rng)
        return (first + 7 * torch.arange(self.config.num_tokens + 1)) % self.config.vocabulary

    def collate(self, items: Sequence[Tensor]) -> Batch:
        x = torch.stack(list(items))
        return {"x": x[:, :-1].contiguous(), "y": x[:, 1:].contiguous()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainLanguage(Train):
    """The one stage."""

    config: LanguageConfig
    name: str = "language"

    @property
    def settings(self) -> Settings:
        return replace(self.config.settings, ema_decay=0.99 if self.config.ema else None)

    def example(self, size: int) -> Batch:
        x = torch.zeros(size, self.config.num_tokens, dtype=torch.long)
        return {"x": x, "y": x.clone()}

    def model(self, i: Inputs) -> nn.Module:
        return build(self.config)

    def optimizer(self, m: nn.Module) -> Optimizer:
        return AdamW(m.parameters(), 3e-4, fused=self.config.fused or None)

    def samples(self, i: Inputs, split: str) -> Windows:
        c = self.config
        # Half a batch is missing: an odd last step.
        size = c.settings.global_batch
        num_train = c.steps * size - size // 2
        return Windows(config=c, count=num_train if split == "train" else _NUM_HELD_OUT)

    def weight(self, b: Batch) -> float:
        return float(b["y"].numel())

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        return Loss(total=_surprise(m, b))

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        return Partial(sums={"surprise": (_surprise(m, b).item(), b["y"].numel())})


def _surprise(m: nn.Module, b: Batch) -> Tensor:
    """The cross entropy of the next tokens, summed."""
    logits_NV = m(b["x"]).float().flatten(0, 1)
    return F.cross_entropy(logits_NV, b["y"].flatten(), reduction="sum")


@dataclass(frozen=True, kw_only=True, slots=True)
class Language(Workload[LanguageConfig]):
    """The workload that `--workload benchmarks.gpu.language:LANGUAGE` names."""

    name: str = "benchmark-language"
    recipes: Mapping[str, Callable[[], LanguageConfig]] = field(
        default_factory=lambda: {"plain": LanguageConfig}
    )
    nominal_samples: Mapping[str, Mapping[str, int]] = field(
        default_factory=lambda: {"plain": {"train": 1904, "validation": _NUM_HELD_OUT}}
    )

    def stages(self, c: LanguageConfig) -> Sequence[TrainLanguage]:
        return (TrainLanguage(config=c),)

    def rungs(self, c: LanguageConfig) -> Sequence[Rung]:
        return micro_batch_rungs(c)

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        (out / "nothing").write_text("-")
        progress(count, count)
        return {}


LANGUAGE = Language()
