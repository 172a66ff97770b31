"""What a detector is made of, apart from its weights.

The defaults are DINO-4scale with ResNet-50, as published (arXiv:2203.03605): 47 million parameters.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from training.settings import check_fields

Backbone: TypeAlias = Literal["resnet18", "resnet34", "resnet50"]
_BackboneNorm: TypeAlias = Literal["frozen_batch", "group"]

# The input projections normalise in groups, as the reference's do.
GROUPS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A detector. Its attention sees `num_levels` maps, at strides of 8, 16, 32 and 64 pixels.

    `backbone_norm="frozen_batch"` is for pretrained weights: their batch statistics are kept, and
    stem and first stage do not learn. "group" is for random ones: it has no statistics that
    a detector's few images a batch, and their padding, could spoil.
    """

    num_classes: int
    backbone: Backbone = "resnet50"
    backbone_norm: _BackboneNorm = "frozen_batch"
    width: int = 256
    num_heads: int = 8
    num_levels: int = 4
    num_points: int = 4
    encoder_layers: int = 6
    decoder_layers: int = 6
    feed_forward: int = 2048
    dropout: float = 0.0
    num_queries: int = 900
    # Queries of contrastive denoising: so many positive ones, and as many negative ones.
    denoising_queries: int = 100
    label_noise: float = 0.5
    box_noise: float = 0.4
    # The encoder's layers keep nothing inside them for backward, which computes it again.
    recompute_encoder: bool = False

    def __post_init__(self) -> None:
        parts = ("num_classes", "width", "num_heads", "num_points", "feed_forward", "num_queries")
        check_fields(
            self,
            at_least={1: (*parts, "encoder_layers", "decoder_layers"), 0: ("denoising_queries",)},
            shares=("dropout", "label_noise", "box_noise"),
        )
        if self.num_levels not in (3, 4):
            raise ValueError(f"num_levels is {self.num_levels}; give 3 or 4")
        if self.width % self.num_heads or self.width % GROUPS:
            raise ValueError(
                f"width {self.width} over num_heads {self.num_heads}: give a width that is a "
                f"multiple of num_heads and of {GROUPS}"
            )

    @property
    def head_width(self) -> int:
        """Channels of one attention head."""
        return self.width // self.num_heads
