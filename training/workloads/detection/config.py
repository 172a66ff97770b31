"""A detector's architecture, without its weights; the recipes and their config.

The architecture's defaults are DINO-4scale with ResNet-50 (arXiv:2203.03605): 47 million
parameters. Recipes: one for a laptop, that of seed document 003, COCO in twelve published epochs.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from training import Settings, check_choice, check_fields

_Backbone: TypeAlias = Literal["resnet18", "resnet34", "resnet50"]

# The input projections normalize in groups, as the reference's do.
GROUPS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A detector. Its attention sees `num_levels` maps, at strides of 8, 16, 32 and 64 pixels.

    A backbone with pretrained weights keeps their batch statistics, and its stem and first stage do
    not learn; one with random weights normalizes in groups, without statistics that a detector's
    small, padded batches could spoil.
    """

    num_classes: int
    backbone: _Backbone = "resnet50"
    weights: Literal["random", "pretrained"] = "pretrained"
    width: int = 256
    num_heads: int = 8
    num_levels: int = 4
    num_points: int = 4
    encoder_layers: int = 6
    decoder_layers: int = 6
    feed_forward: int = 2048
    num_queries: int = 900
    # Queries of contrastive denoising: this many positive ones, and as many negative ones.
    denoising_queries: int = 100
    label_noise: float = 0.5
    # As in the published runs (scripts/DINO_train.sh of IDEA-Research/DINO), which override 0.4 in
    # the config file; the paper's 0.4 is a typo (github.com/IDEA-Research/DINO/issues/75).
    box_noise: float = 1.0
    # To save memory, the encoder's layers are computed again in backward.
    recompute_encoder: bool = False

    def __post_init__(self) -> None:
        parts = ("num_classes", "width", "num_heads", "num_points", "feed_forward", "num_queries")
        check_fields(
            self,
            at_least={1: (*parts, "encoder_layers", "decoder_layers"), 0: ("denoising_queries",)},
            shares=("label_noise", "box_noise"),
        )
        if self.num_levels not in (3, 4):
            raise ValueError(f"num_levels is {self.num_levels}; use 3 or 4")
        if self.width % self.num_heads or self.width % GROUPS:
            raise ValueError(
                f"width {self.width} over num_heads {self.num_heads}: use a width that is a "
                f"multiple of num_heads and of {GROUPS}"
            )

    @property
    def head_width(self) -> int:
        """Channels of one attention head."""
        return self.width // self.num_heads


# Limited by the stride of the coarsest level: a smaller image would have no map there.
_LEAST_SIDE = 64
_SETTINGS = Settings(
    epochs=12,
    global_batch=16,
    micro_batch=2,
    eval_batch=2,
    schedule="constant",
    clip_norm=0.1,
    evaluate_every_epochs=1,
    precision="bfloat16",
    best_metric="AP50",
    loader_workers="auto",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionConfig(Architecture):
    """Everything that determines a run's numbers, apart from data and machine."""

    seed: int = 0
    num_threads: int = 1
    deterministic: bool = True

    # The dataset has the names of the classes.
    num_classes: int = 2
    # The implementation of its attention; "auto" takes the fastest on the machine.
    attention: Literal["auto", "triton", "reference", "deterministic"] = "auto"

    # Images: the shorter side is one of `short_sides`, the longer at most `max_side`; batches are
    # padded to multiples of `pad_to`, which limits the number of shapes.
    short_sides: str = "480,512,544,576,608,640,672,704,736,768,800"
    max_side: int = 1333
    crop_share: float = 0.5
    flip_share: float = 0.5
    pad_to: int = 32

    # Training. A micro-batch is what memory holds: gradients are summed over the global batch and
    # divided by its number of objects, however they are spread over micro-batches.
    settings: Settings = _SETTINGS
    learning_rate: float = 1e-4
    backbone_learning_rate: float = 1e-5
    weight_decay: float = 1e-4
    drop_epoch: int = 11  # from this epoch on, the learning rate is a tenth
    # Predictions per image that are evaluated.
    num_select: int = 300
    # Run the optimizer as one kernel, which is faster on a GPU but rounds differently.
    fused_optimizer: bool = False

    def __post_init__(self) -> None:
        check_choice("precision", self.settings.precision, ("float32", "bfloat16"))
        check_fields(
            self,
            at_least={1: ("num_threads", "num_select", "max_side", "pad_to")},
            above_0=("learning_rate", "backbone_learning_rate"),
            shares=("crop_share", "flip_share"),
        )
        if min(self.sides) < _LEAST_SIDE or max(self.sides) > self.max_side:
            raise ValueError(
                f"short_sides is {self.short_sides!r}; use numbers from {_LEAST_SIDE} to "
                f"max_side, {self.max_side}"
            )
        if not 1 <= self.drop_epoch <= self.epochs:
            raise ValueError(
                f"drop_epoch is {self.drop_epoch} of {self.epochs} epochs; use an epoch from 1 on "
                f"(the last one: no drop), as with --override drop_epoch={self.epochs}"
            )
        # dataclass(slots=True) creates a new class, which super() does not know.
        Architecture.__post_init__(self)

    @property
    def epochs(self) -> int:
        """The number of epochs, which `drop_epoch` must not exceed."""
        if self.settings.epochs is None:
            raise ValueError("epochs is None; give the number of epochs")
        return self.settings.epochs

    @property
    def sides(self) -> tuple[int, ...]:
        """The shorter sides that images are resized to."""
        try:
            return tuple(int(side) for side in self.short_sides.split(","))
        except ValueError:
            raise ValueError(
                f"short_sides is {self.short_sides!r}; use whole numbers with commas"
            ) from None


def laptop() -> DetectionConfig:
    """Train on generated floor plans of at most 160 pixels, on two CPU threads, in 20 minutes."""
    return DetectionConfig(
        num_threads=2,
        backbone="resnet18",
        weights="random",
        width=128,
        encoder_layers=2,
        decoder_layers=2,
        feed_forward=256,
        num_queries=60,
        denoising_queries=30,
        short_sides="128,144,160",
        max_side=160,
        crop_share=0.0,
        settings=replace(
            _SETTINGS,
            global_batch=4,
            micro_batch=4,
            eval_batch=8,
            warmup_steps=50,
            clip_norm=1.0,
            precision="float32",
            loader_workers=0,
        ),
        learning_rate=5e-4,
        backbone_learning_rate=5e-4,
        drop_epoch=10,
        num_select=60,
    )


def full() -> DetectionConfig:
    """Find walls and rooms as in seed document 003: 300 queries, batches of 2, one 24 GB A10G."""
    return DetectionConfig(
        num_threads=4,
        # The fast CUDA kernels add in any order.
        deterministic=False,
        num_queries=300,
        settings=replace(_SETTINGS, epochs=50, global_batch=2, ema_decay=0.9998),
        drop_epoch=46,
        fused_optimizer=True,
    )


def coco_12() -> DetectionConfig:
    """Train DINO-4scale with ResNet-50 on COCO's 80 classes for 12 epochs: published AP 49.0.

    That was with 8 GPUs x 2 images in float32 (arXiv:2203.03605); bfloat16 is our choice.
    """
    return replace(full(), num_classes=80, num_queries=900, settings=_SETTINGS, drop_epoch=11)
