"""The config of the recipes with a frozen backbone, flat and frozen, and the recipes themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

from training.trajectory.clips import NUM_FRAMES
from training.workload import Precision

WEIGHTS = ("random", "pretrained")
# ResNet-18's stages and the channels that each gives.
CHANNELS = MappingProxyType({"layer1": 64, "layer2": 128, "layer3": 256, "layer4": 512})
LAYERS = tuple(CHANNELS)
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryConfig:
    """Everything that decides the numbers of a run, apart from data and machine."""

    seed: int = 0
    num_threads: int = 1
    deterministic: bool = True

    # Features: every `frame_stride`-th frame, resized to `image_size`, through ResNet-18 up to and
    # with `backbone_layer`, pooled to `grid` x `grid` cells.
    weights: str = "random"
    backbone_seed: int = 0
    backbone_layer: str = "layer2"
    image_size: int = 64
    frame_stride: int = 2
    grid: int = 4
    num_shards: int = 16

    # Head.
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.1

    # Baselines: what one frame, the mean image and frames in a random order are worth.
    single_frame_epochs: int = 6
    time_average_epochs: int = 16
    baseline_width: int = 24
    shuffled_epochs: int = 16

    # Training. The loss of the future position counts `position_weight` times.
    epochs: int = 16
    position_weight: float = 0.5
    global_batch: int = 16
    micro_batch: int = 16
    eval_batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 40
    clip_norm: float = 1.0
    evaluate_every_epochs: int = 1
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("backbone_layer", self.backbone_layer, LAYERS)
        check_choice("precision", self.precision, PRECISIONS)
        sizes = ("num_threads", "image_size", "frame_stride", "grid", "num_shards", "width")
        epochs = [f.name for f in fields(self) if f.name.endswith("epochs")]
        for name in (*sizes, "num_layers", "num_heads", *epochs):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("position_weight", self.position_weight, 0.0)
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is no multiple of num_heads {self.num_heads}; change one"
            )
        if self.baseline_width % 8:
            raise ValueError(f"baseline_width is {self.baseline_width}; give a multiple of 8")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; give at least 0 and less than 1")
        if self.learning_rate <= 0.0:
            raise ValueError(f"learning_rate is {self.learning_rate}; give more than 0")

    @property
    def num_frames(self) -> int:
        """Frames of a clip that the head sees."""
        return -(-NUM_FRAMES // self.frame_stride)


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse what is not among the known values."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; give one of {', '.join(known)}")


def check_at_least(name: str, value: float, least: float) -> None:
    """Refuse what is too small."""
    if value < least:
        raise ValueError(f"{name} is {value}; give at least {least}")


def laptop() -> TrajectoryConfig:
    """About a thousand clips on one CPU thread, in about a minute."""
    return TrajectoryConfig()


def full() -> TrajectoryConfig:
    """10,000 clips on one GPU, with ImageNet weights and a checkpoint every two epochs."""
    return TrajectoryConfig(
        num_threads=4,
        # Attention's fast backward passes on CUDA are not deterministic; the price of those that
        # are has not been measured yet.
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
        epochs=40,
        learning_rate=5e-4,
        warmup_steps=500,
        evaluate_every_epochs=2,
        precision="bfloat16",
    )
