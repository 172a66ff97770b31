"""The models of sizing/evidence/ground_truths.csv, rebuilt for counting and never trained.

B batch, T tokens, D width; in BERT H heads, K width of a head.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GROUND_TRUTHS_FILE = Path(__file__).parents[2] / "sizing" / "evidence" / "ground_truths.csv"
# Counting needs no data: images of this many pixels a side, as in timm's table.
_IMAGE_SIZES = {
    "inception_v3": 299,
    "efficientnet_b2": 256,
    "efficientnet_b4": 380,
    "efficientnet_v2_s": 288,
}
_HEAD, _WORDS, _POSITIONS, _DROPOUT = 64, 30_528, 512, 0.1
# Layers, width and tokens of the models in sizing/evidence/ground_truths.csv, by name.
BERTS = {
    "bert_base_384": (12, 768, 384),
    "bert_large_384": (24, 1024, 384),
    "bert_large_128": (24, 1024, 128),
    "bert_large_512": (24, 1024, 512),
}
_VITS = {"vit_tiny_16": (16, 3, 192), "vit_small_16": (16, 6, 384), "vit_small_32": (32, 6, 384)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """One model: how to build it, a batch of a size, its loss, and the samples to count with."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    samples: int


def anchors() -> Mapping[str, Anchor]:
    """Return every model that sizing/evidence/ground_truths.csv names, by that name."""
    language = {
        "growth_dense": _language_model(experts=0),
        "growth_moe": _language_model(experts=8),
    } | {name: _bert(*shape) for name, shape in BERTS.items()}
    return {name: language.get(name) or _classifier(name) for name in precisions()}


def precisions() -> Mapping[str, list[str]]:
    """Return in which precisions each model of the ground truths ran."""
    found: dict[str, list[str]] = {}
    with _GROUND_TRUTHS_FILE.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            # Detectors read their data, so anchors/detection.py has them.
            if not row["model"] or "rcnn" in row["model"]:
                continue
            precision = "float32" if row["precision"] == "tf32" else row["precision"]
            counted = found.setdefault(row["model"], [])
            if precision not in counted:
                counted.append(precision)
    return found


def _classifier(name: str) -> Anchor:
    side = _IMAGE_SIZES.get(name, 224)

    def build() -> nn.Module:
        import torchvision

        if name in _VITS:
            patch, heads, width = _VITS[name]
            model: nn.Module = torchvision.models.VisionTransformer(
                image_size=224,
                patch_size=patch,
                num_layers=12,
                num_heads=heads,
                hidden_dim=width,
                mlp_dim=4 * width,
            )
            return model
        if name == "resnext101_32x4d":
            resnet = torchvision.models.resnet
            found: nn.Module = resnet.ResNet(
                resnet.Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4
            )
            return found
        extra = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
        model = torchvision.models.get_model(name, weights=None, **extra)
        assert isinstance(model, nn.Module)
        return model

    def batch(size: int) -> Any:
        images = torch.zeros(size, 3, side, side).contiguous(memory_format=torch.channels_last)
        return images, torch.zeros(size, dtype=torch.long)

    def loss(model: nn.Module, given: Any) -> Tensor:
        return F.cross_entropy(model(given[0]), given[1])

    return Anchor(build=build, batch=batch, loss=loss, samples=4)


class _Norm(nn.Module):
    """RMSNorm written out, as in the upstream run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.gain * (x_BTD * torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + 1e-6))


class _GatedFfn(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class _Experts(nn.Module):
    """Top-2 of E with every expert equally busy: the average cost of routing, without data."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(_GatedFfn(width, hidden) for _ in range(experts))

    def forward(self, x_BTD: Tensor) -> Tensor:
        flat = x_BTD.flatten(0, 1)
        share = self.router(flat).softmax(-1)
        rows = 2 * len(flat) // len(self.experts)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            # Any rows will do: a token's expert does not change the amount of computation.
            taken = torch.arange(rows, device=flat.device)
            weighted = expert(flat[taken]) * share[taken, number : number + 1]
            out = out.index_add(0, taken, weighted)
        return out.view_as(x_BTD)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = nn.ModuleList(_Norm(width) for _ in range(2))
        self.ffn = _Experts(width, hidden, experts) if experts else _GatedFfn(width, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.norms[0](x_BTD)
        x_BTD = x_BTD + self.attention(y_BTD, y_BTD, y_BTD, need_weights=False)[0]
        out: Tensor = x_BTD + self.ffn(self.norms[1](x_BTD))
        return out


class _LanguageModel(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50257, 832)
        self.blocks = nn.Sequential(*(_Block(832, 8, 3328, experts) for _ in range(7)))
        self.norm = _Norm(832)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(self.embed(tokens_BT))), self.embed.weight)


def _language_model(experts: int) -> Anchor:
    def batch(size: int) -> Tensor:
        return torch.zeros(size, 256, dtype=torch.long)

    def loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())

    return Anchor(
        build=partial(_LanguageModel, experts),
        batch=batch,
        loss=loss,
        samples=8,
    )


class _BertLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            layer(x_BTD).unflatten(-1, (-1, _HEAD)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        share_BHTT = F.dropout((q_BHTK @ k_BHTK.mT / _HEAD**0.5).softmax(-1), _DROPOUT)
        seen_BTD = self.out((share_BHTT @ v_BHTK).transpose(1, 2).flatten(2))
        x_BTD = self.norms[0](x_BTD + F.dropout(seen_BTD, _DROPOUT))
        thought_BTD = self.down(F.gelu(self.up(x_BTD)))
        out_BTD: Tensor = self.norms[1](x_BTD + F.dropout(thought_BTD, _DROPOUT))
        return out_BTD


class _Bert(nn.Module):
    """As NVIDIA's examples write it out: each token's logits to start and to end the answer."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(_WORDS, width), nn.Embedding(_POSITIONS, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(_BertLayer(width) for _ in range(layers)))
        self.answer = nn.Linear(width, 2)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1])
        x_BTD = self.norm(self.words(tokens_BT) + self.positions(places_T))
        logits_BT2: Tensor = self.answer(self.layers(F.dropout(x_BTD, _DROPOUT)))
        return logits_BT2


def _bert(layers: int, width: int, tokens: int) -> Anchor:
    def batch(size: int) -> Tensor:
        return torch.zeros(size, tokens, dtype=torch.long)

    def loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
        starts_ends_BT2: Tensor = model(tokens_BT)
        answers = torch.zeros(len(tokens_BT), 2, dtype=torch.long)
        return F.cross_entropy(starts_ends_BT2, answers)

    return Anchor(build=partial(_Bert, layers, width, tokens), batch=batch, loss=loss, samples=4)
