"""The configs and recipes, with a frozen backbone and for MAGVIT, and their shared checks."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal

from training import Settings, check_choice, check_fields
from training.workloads.trajectory.clips import CLASSES, FRAME_SIZE, NUM_FRAMES

# The ways to make clips (a tracker can follow the easy ones), and to take their frames.
DIFFICULTIES, SAMPLINGS = ("easy", "hard"), ("uniform", "segments")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipOptions:
    """Options `--override name=value` for `data make` (the first two) and `data import` (all but
    the first).
    """

    difficulty: str = "easy"
    # Of each class, where the source has no validation of its own.
    validation_share: float = 0.1
    # Frames evenly from the entire video, or one per segment: for training, a random one.
    sampling: str = "uniform"
    # UCF-101's or Kinetics' lists, separated by commas: the files to take for each split.
    lists: str = ""
    # More broken files than this share are not an accident.
    left_out_share: float = 0.1

    def __post_init__(self) -> None:
        check_choice("difficulty", self.difficulty, DIFFICULTIES)
        check_choice("sampling", self.sampling, SAMPLINGS)
        check_fields(self, below_1=("left_out_share", "validation_share"))


def as_row(names: Iterable[str]) -> str:
    """Return the names of classes in one line, as `classes` has them."""
    return ",".join('"{}"'.format(n.replace('"', '""')) if {*n} & {*',"'} else n for n in names)


# The baseline's first layer has half its width, in four groups.
_BASELINE_MULTIPLE = 8
_SETTINGS = Settings(
    epochs=16,
    global_batch=16,
    micro_batch=16,
    eval_batch=64,
    warmup_steps=40,
    clip_norm=1.0,
    evaluate_every_epochs=1,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeConfig:
    """Everything that determines a run's numbers, apart from data and machine."""

    seed: int = 0
    num_threads: int = 1
    deterministic: bool = True

    # The dataset's classes, in its order, as a row of CSV: a name with a comma is in quotes. A
    # user's dataset has them in its manifest.
    classes: str = ",".join(CLASSES)

    # The Transformer.
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.1
    # For a few hundred clips: it is told how the path bends, and a head on frozen features begins
    # by looking where something moves.
    is_guided: bool = False

    # Baselines: the accuracy of less than the entire clip. They take over half of a run's time.
    # Without epochs, this one and `shuffled` are left out.
    baselines: bool = True
    time_average_epochs: int = 16
    baseline_width: int = 24

    # Training. The weights multiply the losses of the future position, and of the ball's place in
    # each frame; clips without a track have neither loss.
    settings: Settings = _SETTINGS
    position_weight: float = 0.5
    place_weight: float = 10.0
    num_shards: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    # Run the optimizer as one kernel, which is faster on a GPU but rounds differently.
    fused_optimizer: bool = False

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes, in the order of their labels."""
        return tuple(next(csv.reader([self.classes])))

    def __post_init__(self) -> None:
        if len(set(self.class_names)) < 2 or not all(self.class_names):
            raise ValueError(f"classes is {self.classes!r}; use two or more names with commas")
        check_choice("precision", self.settings.precision, ("float32", "bfloat16"))
        epochs = {field.name for field in fields(self) if field.name.endswith("epochs")}
        epochs -= {"time_average_epochs", "shuffled_epochs"}  # 0 leaves the baseline out
        check_fields(
            self,
            at_least={
                1: ("num_threads", "num_shards", "width", "num_layers", "num_heads", *epochs),
                0: ("position_weight", "place_weight", "weight_decay"),
                _BASELINE_MULTIPLE: ("baseline_width",),
            },
            above_0=("learning_rate",),
            below_1=("dropout",),
        )
        if self.baseline_width % _BASELINE_MULTIPLE:
            raise ValueError(
                f"baseline_width is {self.baseline_width}; use a multiple of {_BASELINE_MULTIPLE}"
            )
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}; change one"
            )


# ResNet-18's stages and their output channels.
CHANNELS = MappingProxyType({"layer1": 64, "layer2": 128, "layer3": 256, "layer4": 512})
LAYERS = tuple(CHANNELS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryConfig(RecipeConfig):
    """The fields of recipes with a frozen backbone, besides the shared ones."""

    # Features: every `frame_stride`-th frame, resized to `image_size`, through ResNet-18 up to
    # `backbone_layer`, pooled to `grid` x `grid` cells.
    weights: Literal["random", "pretrained"] = "random"
    backbone_seed: int = 0
    backbone_layer: str = "layer2"
    image_size: int = 64
    frame_stride: int = 2
    grid: int = 8
    # Channels of a small path, trained on the pixels alongside them; 0: no path.
    pixel_width: int = 0

    # More baselines: where a tracker finds the ball, one frame, and frames in random order.
    tracker_epochs: int = 16
    single_frame_epochs: int = 6
    shuffled_epochs: int = 16

    def __post_init__(self) -> None:
        # dataclass(slots=True) creates a new class, which super() does not know.
        RecipeConfig.__post_init__(self)
        check_choice("backbone_layer", self.backbone_layer, LAYERS)
        check_fields(
            self, at_least={1: ("image_size", "frame_stride", "grid"), 0: ("pixel_width",)}
        )

    @property
    def num_frames(self) -> int:
        """The number of a clip's frames that the head sees."""
        return -(-NUM_FRAMES // self.frame_stride)


def laptop() -> TrajectoryConfig:
    """Train on about a thousand clips on one CPU thread, in about a minute."""
    return TrajectoryConfig()


def demo() -> TrajectoryConfig:
    """Train on 165 clips on one CPU thread, in half a minute, with a tracker and a single frame."""
    return replace(
        laptop(),
        is_guided=True,
        time_average_epochs=0,
        shuffled_epochs=0,
        tracker_epochs=8,
        single_frame_epochs=8,
        settings=replace(_SETTINGS, epochs=8),
    )


def full() -> TrajectoryConfig:
    """Train on 10,000 clips on one GPU: ImageNet weights and a path on the pixels, every frame."""
    return TrajectoryConfig(
        baselines=False,
        num_threads=4,
        # Attention's fast backward passes on CUDA are not deterministic; deterministic ones have
        # not been measured yet.
        deterministic=False,
        weights="pretrained",
        image_size=128,
        frame_stride=1,
        pixel_width=16,
        num_shards=20,
        tracker_epochs=40,
        single_frame_epochs=10,
        time_average_epochs=40,
        baseline_width=64,
        shuffled_epochs=40,
        settings=replace(
            _SETTINGS,
            epochs=40,
            global_batch=64,
            micro_batch=64,
            warmup_steps=100,
            evaluate_every_epochs=2,
            precision="bfloat16",
        ),
        fused_optimizer=True,
    )


def reference() -> TrajectoryConfig:
    """Follow seed document 000: all of ResNet-18, 512 features, batch 16, 30 epochs at 64 px."""
    c = full()
    return replace(
        c,
        image_size=FRAME_SIZE,
        backbone_layer="layer4",
        grid=1,
        pixel_width=0,
        width=256,
        num_layers=4,
        num_heads=8,
        learning_rate=5e-4,
        settings=replace(c.settings, epochs=30, global_batch=16, micro_batch=16, warmup_steps=500),
    )


# Tokens are stored as int32.
_MAX_CODES = 2**31
_MAGVIT_SETTINGS = replace(_SETTINGS, epochs=6, eval_batch=32)


@dataclass(frozen=True, kw_only=True, slots=True)
class MagvitConfig(RecipeConfig):
    """The fields of MAGVIT recipes, besides the shared ones."""

    # Tokenizer. A token is 2x4x4 pixels with the patch stem; the full stem works at full resolution
    # and halves to 4x8x8.
    stem: Literal["patch", "full"] = "patch"
    tokenizer_width: int = 32
    # Levels of each dimension of a code. There are 2^24 codes, guessed dimension by dimension, like
    # MAGVIT-v2's 2^18 (arXiv:2310.05737): with 8,8,8,6,5, a plain background is 5 dB worse.
    levels: str = "16,16,16,16,16,16"
    # Extra weight of pixels that differ from the clip's mean image; weights of the distance of
    # ResNet-18's features (ImageNet or random weights) and of a critic (both 0: neither).
    motion_weight: float = 20.0
    perceptual_weight: float = 0.0
    adversarial_weight: float = 0.0
    weights: Literal["random", "pretrained"] = "pretrained"
    tokenizer_epochs: int = 2
    tokenizer_learning_rate: float = 3e-3
    tokenizer_batch: int = 4
    # It trains on this many consecutive frames, later ones in each step; fewer make steps faster.
    tokenizer_frames: int = NUM_FRAMES

    # Transformer over tokens.
    masked_share: float = 0.25
    masked_weight: float = 0.05
    # For generation; predictions that are compared with the truth have no temperature.
    temperature: float = 0.6
    settings: Settings = _MAGVIT_SETTINGS

    def __post_init__(self) -> None:
        # dataclass(slots=True) creates a new class, which super() does not know.
        RecipeConfig.__post_init__(self)
        check_fields(
            self,
            at_least={
                1: ("tokenizer_width",),
                0: (
                    *("motion_weight", "perceptual_weight", "adversarial_weight", "masked_weight"),
                    "temperature",
                ),
            },
            above_0=("tokenizer_learning_rate",),
            below_1=("masked_share",),
        )
        if len(self.num_levels) < 1 or min(self.num_levels) < 2:
            raise ValueError(f"levels is {self.levels!r}; use numbers from 2, as in 8,8,8,6,5")
        if self.num_codes > _MAX_CODES:
            raise ValueError(
                f"levels is {self.levels!r}, which makes {self.num_codes} codes; "
                f"use at most {_MAX_CODES}"
            )
        if self.tokenizer_frames not in (whole := range(4, NUM_FRAMES + 1, 4)):
            raise ValueError(f"tokenizer_frames is {self.tokenizer_frames}; use one of {[*whole]}")
        if self.settings.micro_batch < self.least_micro_batch:
            raise ValueError(
                f"micro_batch is {self.settings.micro_batch}, of which a masked_share of "
                f"{self.masked_share} is less than a clip, so nothing would be generated; use at "
                f"least {self.least_micro_batch}, or masked_share=0"
            )

    @property
    def least_micro_batch(self) -> int:
        """The smallest number of clips of which one is masked."""
        return math.ceil(1.0 / self.masked_share) if self.masked_share else 1

    @property
    def num_levels(self) -> tuple[int, ...]:
        """The levels of each dimension of a code."""
        try:
            return tuple(int(level) for level in self.levels.split(","))
        except ValueError as error:
            raise ValueError(
                f"levels is {self.levels!r}; use numbers from 2, as in 8,8,8,6,5"
            ) from error

    @property
    def num_codes(self) -> int:
        """The number of different codes."""
        return math.prod(self.num_levels)

    @property
    def token_shape(self) -> tuple[int, int]:
        """The time steps of a clip's tokens, and the cells per step."""
        frames, pixels = (2, 4) if self.stem == "patch" else (4, 8)
        return NUM_FRAMES // frames, (FRAME_SIZE // pixels) ** 2

    @property
    def merged(self) -> int:
        """Tokens along height and width that the Transformer merges into each of 8x8 places."""
        return 2 if self.stem == "patch" else 1


def magvit_laptop() -> MagvitConfig:
    """Train on a few thousand clips on one CPU thread, in a few minutes per Train stage."""
    return MagvitConfig(tokenizer_epochs=8, tokenizer_frames=8)


def magvit_full() -> MagvitConfig:
    """Train on 10,000 clips on one GPU: a full-resolution tokenizer, 4x8x8 pixels per token."""
    return MagvitConfig(
        baselines=False,
        num_threads=4,
        deterministic=False,
        stem="full",
        tokenizer_epochs=20,
        tokenizer_learning_rate=1e-3,
        width=192,
        num_layers=6,
        num_heads=6,
        settings=replace(
            _MAGVIT_SETTINGS,
            epochs=40,
            warmup_steps=500,
            evaluate_every_epochs=2,
            precision="bfloat16",
        ),
        learning_rate=5e-4,
        time_average_epochs=40,
        baseline_width=64,
        num_shards=20,
        fused_optimizer=True,
    )


def magvit_b() -> MagvitConfig:
    """Train MAGVIT-B in its published size: width 768, 12 layers, 12 heads, tokenizer with critic.

    Yu et al. 2022 (arXiv:2212.05199), appendix B.
    """
    c = magvit_full()
    return replace(
        c,
        tokenizer_width=64,
        tokenizer_learning_rate=1e-4,
        perceptual_weight=0.1,
        adversarial_weight=0.1,
        width=768,
        num_layers=12,
        num_heads=12,
        learning_rate=1e-4,
    )
