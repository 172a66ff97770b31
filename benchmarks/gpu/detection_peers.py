"""What a detector's step is measured on, and transformers' Deformable DETR of the same size.

Its two-stage form with refined boxes and losses of every layer is the nearest to DINO that there
is: the same backbone, levels, layers, widths and queries, but no denoising.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from training.workloads.detection.architecture import Architecture

# Walls and rooms, and as many objects as a floor plan of the laptop's has on average.
NUM_CLASSES, NUM_OBJECTS = 2, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A batch of images, all of one size, and the detector that sees it."""

    images: int
    height: int
    width: int
    architecture: Architecture

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(height, width) of each level, at strides of 8, 16, 32 and 64 pixels."""
        strides = (8, 16, 32, 64)[: self.architecture.num_levels]
        return [(-(-self.height // each), -(-self.width // each)) for each in strides]


_TINY = Architecture(
    num_classes=NUM_CLASSES,
    backbone="resnet18",
    width=32,
    num_heads=2,
    encoder_layers=1,
    decoder_layers=1,
    feed_forward=32,
    num_queries=5,
    denoising_queries=9,
)
_REFERENCE = Architecture(num_classes=NUM_CLASSES, num_queries=900)

SCALES: Mapping[str, Scale] = {
    "tiny": Scale(images=1, height=64, width=96, architecture=_TINY),
    "reference": Scale(images=2, height=800, width=1333, architecture=_REFERENCE),
}

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
LossOf: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_BLOCKS: dict[str, dict[str, Any]] = {
    "resnet18": {
        "depths": [2, 2, 2, 2],
        "hidden_sizes": [64, 128, 256, 512],
        "layer_type": "basic",
    },
    "resnet50": {},
}


def attention(scale: Scale, device: torch.device, *, compiled: bool) -> Attend:
    """The operation alone, of values, locations and weights."""
    from transformers.models.deformable_detr.modeling_deformable_detr import (
        MultiScaleDeformableAttention,
    )

    operation: Any = MultiScaleDeformableAttention()
    if compiled:
        operation = torch.compile(operation)
    shapes = scale.shapes
    sizes = torch.tensor(shapes, device=device)
    starts = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]])

    def attend(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = operation(value, sizes, shapes, starts, locations, weights, 64)
        return found

    return attend


def detector(scale: Scale) -> tuple[nn.Module, LossOf]:
    """A model with random weights, and its own loss."""
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    a = scale.architecture
    blocks = {"out_features": ["stage2", "stage3", "stage4"], **_BLOCKS[a.backbone]}
    classes: dict[str, Any] = {"num_labels": NUM_CLASSES}
    config = DeformableDetrConfig(
        backbone_config=ResNetConfig(**blocks),
        d_model=a.width,
        encoder_layers=a.encoder_layers,
        decoder_layers=a.decoder_layers,
        encoder_attention_heads=a.num_heads,
        decoder_attention_heads=a.num_heads,
        encoder_ffn_dim=a.feed_forward,
        decoder_ffn_dim=a.feed_forward,
        num_feature_levels=a.num_levels,
        num_queries=a.num_queries,
        two_stage_num_proposals=a.num_queries,
        two_stage=True,
        with_box_refine=True,
        auxiliary_loss=True,
        dropout=a.dropout,
        **classes,
    )
    model = DeformableDetrForObjectDetection(config)
    # As the reference, and as timm's ResNet is treated there: 5.23 freezes all of its own, as it
    # looks for names like "stage.1".
    for name, parameter in model.model.backbone.named_parameters():
        parameter.requires_grad_("embedder" not in name and "stages.0" not in name)

    def loss(images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        pairs = zip(labels, boxes, strict=True)
        found = model(
            pixel_values=images.to(boxes.dtype) / 255,
            pixel_mask=images.new_ones(len(images), *images.shape[2:], dtype=torch.long),
            labels=[{"class_labels": own, "boxes": at} for own, at in pairs],
        )
        total: Tensor = found.loss
        return total

    return model, loss
