"""The trajectory workload's config, one flat frozen dataclass, and its recipes, a function each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from training.workload import Precision

WEIGHTS = ("random", "pretrained")
# ResNet-18's stages and the channels that each gives.
CHANNELS = MappingProxyType({"layer1": 64, "layer2": 128, "layer3": 256, "layer4": 512})
LAYERS = tuple(CHANNELS)


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

    # Training; `single_frame_epochs` belongs to the baseline.
    epochs: int = 16
    single_frame_epochs: int = 6
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
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights is {self.weights!r}; give one of {', '.join(WEIGHTS)}")
        if self.backbone_layer not in LAYERS:
            raise ValueError(
                f"backbone_layer is {self.backbone_layer!r}; give one of {', '.join(LAYERS)}"
            )
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision is {self.precision!r}; give float32 or bfloat16")
        for name in ("num_threads", "image_size", "frame_stride", "grid", "num_shards", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        for name in ("num_layers", "num_heads", "epochs", "single_frame_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is no multiple of num_heads {self.num_heads}; change one"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; give at least 0 and less than 1")
        if self.learning_rate <= 0.0:
            raise ValueError(f"learning_rate is {self.learning_rate}; give more than 0")


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
        epochs=40,
        single_frame_epochs=10,
        learning_rate=5e-4,
        warmup_steps=500,
        evaluate_every_epochs=2,
        precision="bfloat16",
    )


# The dataset that each recipe is made for: `data make --count` of 1,000 and 10,000 clips.
NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "laptop": {"train": 800, "validation": 200},
        "full": {"train": 8_000, "validation": 2_000},
    }
)

RECIPES: Mapping[str, Callable[[], TrajectoryConfig]] = MappingProxyType(
    {"laptop": laptop, "full": full}
)
