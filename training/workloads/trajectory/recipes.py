"""The config of the recipes with a frozen backbone, and these recipes."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from training.settings import check_choice, check_fields
from training.workloads.trajectory.clips import NUM_FRAMES
from training.workloads.trajectory.config import SETTINGS, RecipeConfig

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
    grid: int = 4

    # Baselines: how far one frame, and frames in random order, get.
    single_frame_epochs: int = 6
    shuffled_epochs: int = 16

    def __post_init__(self) -> None:
        # Not super(): dataclass(slots=True) creates a new class that super() does not know.
        RecipeConfig.__post_init__(self)
        check_choice("backbone_layer", self.backbone_layer, LAYERS)
        check_fields(self, at_least={1: ("image_size", "frame_stride", "grid")})

    @property
    def num_frames(self) -> int:
        """Number of a clip's frames that the head sees."""
        return -(-NUM_FRAMES // self.frame_stride)


def laptop() -> TrajectoryConfig:
    """About a thousand clips on one CPU thread, in about a minute."""
    return TrajectoryConfig()


def full() -> TrajectoryConfig:
    """10,000 clips on one GPU, with ImageNet weights and a checkpoint every two epochs."""
    return TrajectoryConfig(
        num_threads=4,
        # Attention's fast backward passes on CUDA are not deterministic; the cost of deterministic
        # ones has not been measured yet.
        deterministic=False,
        weights="pretrained",
        image_size=128,
        frame_stride=1,
        num_shards=20,
        width=256,
        num_layers=4,
        num_heads=8,
        single_frame_epochs=10,
        time_average_epochs=40,
        baseline_width=64,
        shuffled_epochs=40,
        settings=replace(
            SETTINGS, epochs=40, warmup_steps=500, evaluate_every_epochs=2, precision="bfloat16"
        ),
        learning_rate=5e-4,
        fused_optimizer=True,
    )
