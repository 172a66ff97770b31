"""A detector of DINO's shape (ResNet-50, four scales), to be counted before it is a workload.

B images, T tokens of all scales, Q queries, D width, H heads, L levels, P points. Attention is that
of the CUDA operator, which keeps its inputs only.

python -m sizing model benchmarks.anchors.dino:dino --batch 2 --precision float32 --samples 2935
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_D, _HEADS, _LEVELS, _POINTS, _HIDDEN, _LAYERS = 256, 8, 4, 4, 2048, 6
_QUERIES, _DENOISING, _CLASSES, _OBJECTS = 900, 200, 91, 20
_HEIGHT, _WIDTH = 800, 1333


def dino(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """DINO-4scale with 900 queries and 100 pairs of denoising queries."""
    return _Detector(), torch.zeros(samples, 3, _HEIGHT, _WIDTH), _loss


def dino_padded(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """The batch that takes the most memory: a wide and a tall image, both padded to a square."""
    return _Detector(), torch.zeros(samples, 3, _WIDTH, _WIDTH), _loss


class _Sampled(torch.autograd.Function):
    """The operator's memory: keeps values, places and weights, returns the weighted sums."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(value, places, weights)
        return value.new_empty(len(value), places.shape[1], _D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors)


class _DeformableAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(_D, _D), nn.Linear(_D, _D)
        self.places = nn.Linear(_D, _HEADS * _LEVELS * _POINTS * 2)
        self.weights = nn.Linear(_D, _HEADS * _LEVELS * _POINTS)

    def forward(self, queries_BQD: Tensor, memory_BTD: Tensor) -> Tensor:
        offsets = self.places(queries_BQD)
        # Reference points are added, as the real one does.
        places = offsets + torch.zeros_like(offsets)
        weights = self.weights(queries_BQD).unflatten(-1, (_HEADS, -1)).softmax(-1)
        found = _Sampled.apply(self.value(memory_BTD), places, weights)
        out: Tensor = self.out(found)
        return out


def _ffn() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_D, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _D))


class _EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ffn = _DeformableAttention(), _ffn()
        self.norms = nn.ModuleList(nn.LayerNorm(_D) for _ in range(2))

    def forward(self, x_BTD: Tensor, places_TD: Tensor) -> Tensor:
        x_BTD = self.norms[0](x_BTD + self.attention(x_BTD + places_TD, x_BTD))
        out: Tensor = self.norms[1](x_BTD + self.ffn(x_BTD))
        return out


class _DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(_D, _HEADS, batch_first=True)
        self.attention, self.ffn = _DeformableAttention(), _ffn()
        self.norms = nn.ModuleList(nn.LayerNorm(_D) for _ in range(3))
        self.classes, self.box = nn.Linear(_D, _CLASSES), _box()

    def forward(self, x_BQD: Tensor, memory_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The authors' code asks for the weights and drops them, which keeps them for backward.
        y_BQD = self.own(x_BQD, x_BQD, x_BQD)[0]
        x_BQD = self.norms[0](x_BQD + y_BQD)
        x_BQD = self.norms[1](x_BQD + self.attention(x_BQD, memory_BTD))
        x_BQD = self.norms[2](x_BQD + self.ffn(x_BQD))
        return x_BQD, self.classes(x_BQD), self.box(x_BQD).sigmoid()


def _box() -> nn.Sequential:
    inside = (nn.Linear(_D, _D), nn.ReLU(), nn.Linear(_D, _D), nn.ReLU())
    return nn.Sequential(*inside, nn.Linear(_D, 4))


class _Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone()
        widths = ((512, 1, 1), (1024, 1, 1), (2048, 1, 1), (2048, 3, 2))
        self.inputs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, _D, side, stride, side // 2), nn.GroupNorm(32, _D))
            for width, side, stride in widths
        )
        self.levels = nn.Parameter(torch.zeros(_LEVELS, _D))
        self.encoder = nn.ModuleList(_EncoderLayer() for _ in range(_LAYERS))
        self.proposals = nn.Sequential(nn.Linear(_D, _D), nn.LayerNorm(_D))
        self.proposed, self.proposed_box = nn.Linear(_D, _CLASSES), _box()
        self.queries = nn.Embedding(_QUERIES, _D)
        self.labels = nn.Embedding(_CLASSES + 1, _D)
        self.decoder = nn.ModuleList(_DecoderLayer() for _ in range(_LAYERS))

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        maps = [*self.backbone(images).values()]
        maps = [each(m) for each, m in zip(self.inputs, [*maps, maps[-1]], strict=True)]
        memory_BTD = torch.cat([m.flatten(2).transpose(1, 2) for m in maps], 1)
        places_TD = self.levels[0].expand(memory_BTD.shape[1], -1)
        for layer in self.encoder:
            memory_BTD = layer(memory_BTD, places_TD)
        found_BTD = self.proposals(memory_BTD)
        found = [(self.proposed(found_BTD), self.proposed_box(found_BTD).sigmoid())]
        denoising = self.labels.weight[:1].expand(_DENOISING, -1)
        queries_QD = torch.cat([denoising, self.queries.weight])
        x_BQD = queries_QD.expand(len(images), -1, -1)
        for decode in self.decoder:
            x_BQD, classes, boxes = decode(x_BQD, memory_BTD)
            found.append((classes, boxes))
        return found


def _backbone() -> nn.Module:
    """ResNet-50 with frozen statistics, stem and first stage, as detectors are trained."""
    import torchvision
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.ops.misc import FrozenBatchNorm2d

    body = torchvision.models.resnet50(weights=None, norm_layer=FrozenBatchNorm2d)
    for part in (body.conv1, body.layer1):
        part.requires_grad_(False)
    model = IntermediateLayerGetter(body, {"layer2": "8", "layer3": "16", "layer4": "32"})
    assert isinstance(model, nn.Module)
    return model


def _loss(model: nn.Module, images: Tensor) -> Tensor:
    """Focal loss of every score, and boxes of as many queries as there are objects."""
    parts = []
    for classes, boxes in model(images):
        chance, target = classes.sigmoid(), torch.zeros_like(classes)
        wrong = F.binary_cross_entropy_with_logits(classes, target, reduction="none")
        parts.append((wrong * (1 - chance) ** 2).sum() + boxes[:, :_OBJECTS].abs().sum())
    return torch.stack(parts).sum()
