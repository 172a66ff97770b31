"""The imagenet recipes, one for a laptop and four for a GPU, and their config.

docs/imagenet.md has the published accuracy of the latter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from training import Settings, check_choice, check_fields

# Training sizes are multiples of this: the network halves them five times, and code is compiled
# separately for each size.
_SIZE_STEP = 32
# torchvision's RandAugment has magnitudes up to this.
_MOST_AUGMENTED = 30
# A recipe's learning rate is for a batch of this many images.
BASE_BATCH = 256

_SETTINGS = Settings(
    epochs=90,
    global_batch=1024,
    micro_batch=256,
    eval_batch=256,
    drop_last=True,
    evaluate_every_epochs=1,
    best_metric="top1",
)

# ffcv-imagenet's learning rate and its batch size: 512 on each of 8 GPUs.
_FFCV_RATE, _FFCV_BATCH = 1.7, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagenetConfig:
    """Everything that determines a run's numbers, apart from data and machine.

    Training images have `low_size` up to `low_until_epoch`, then sizes that grow evenly to
    `train_size`, reached at `train_size_from_epoch`. The learning rate is for BASE_BATCH images and
    is scaled to `global_batch`.
    """

    seed: int = 0
    num_threads: int = 1
    deterministic: bool = True

    # resnet8, the name of one of torchvision's models, or timm/NAME where timm is installed.
    architecture: str = "resnet50"
    num_classes: int = 1000
    blur_pool: bool = False

    train_size: int = 224
    low_size: int = 224
    low_until_epoch: int = 0
    train_size_from_epoch: int = 0
    eval_size: int = 224
    # Also evaluates the mirrored image, and reports the figures of both next to the plain ones.
    evaluate_flips: bool = False
    shuffle_window: int = 16
    # RandAugment's magnitude, 0 to 30; the alphas of mixup and CutMix (if both are set, each
    # micro-batch gets one of them). 0: none.
    rand_augment: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0

    settings: Settings = _SETTINGS
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.1
    # A layer's learning rate is this many times the next one's; the last layer has the full rate.
    layer_decay: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    label_smoothing: float = 0.0
    warmup_epochs: int = 5

    def __post_init__(self) -> None:
        check_choice("schedule", self.settings.schedule, ("cosine", "linear"))
        check_fields(
            self,
            at_least={
                1: ("num_threads", "shuffle_window"),
                0: ("momentum", "weight_decay", "warmup_epochs", "rand_augment", "mixup", "cutmix"),
                2: ("num_classes",),
            },
            above_0=("learning_rate",),
            below_1=("label_smoothing",),
        )
        if not 0.0 < self.layer_decay <= 1.0:
            raise ValueError(f"layer_decay is {self.layer_decay}; use more than 0 and at most 1")
        if self.rand_augment > _MOST_AUGMENTED:
            raise ValueError(f"rand_augment is {self.rand_augment}; give 0 to {_MOST_AUGMENTED}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        for name in ("train_size", "low_size"):
            value = getattr(self, name)
            if value < _SIZE_STEP or value % _SIZE_STEP:
                raise ValueError(f"{name} is {value}; give a multiple of {_SIZE_STEP}")
        if self.eval_size < _SIZE_STEP:
            raise ValueError(f"eval_size is {self.eval_size}; give at least {_SIZE_STEP}")
        if self.low_size > self.train_size:
            raise ValueError(
                f"low_size {self.low_size} is above train_size {self.train_size}; change one"
            )
        ramp = (self.low_until_epoch, self.train_size_from_epoch)
        if not 0 <= ramp[0] <= ramp[1] <= self.epochs:
            low, full = (min(number, self.epochs) for number in ramp)
            raise ValueError(
                f"low_until_epoch {ramp[0]} and train_size_from_epoch {ramp[1]}; give them in "
                f"order, up to the {self.epochs} epochs, as with --override low_until_epoch={low} "
                f"--override train_size_from_epoch={full}"
            )

    @property
    def epochs(self) -> int:
        """The number of epochs, over which the images grow."""
        if self.settings.epochs is None:
            raise ValueError("epochs is None; give the number of epochs")
        return self.settings.epochs

    def image_size(self, epoch: int) -> int:
        """Return the side of an epoch's images; -1: of those that are evaluated."""
        if epoch < 0:
            return self.eval_size
        if epoch >= self.train_size_from_epoch:
            return self.train_size
        if epoch < self.low_until_epoch:
            return self.low_size
        done = (epoch - self.low_until_epoch) / (self.train_size_from_epoch - self.low_until_epoch)
        grown = self.low_size + done * (self.train_size - self.low_size)
        return round(grown / _SIZE_STEP) * _SIZE_STEP


def _laptop() -> ImagenetConfig:
    """Train a small ResNet on pictures that `data make` draws: half a minute on one CPU thread."""
    return ImagenetConfig(
        architecture="resnet8",
        num_classes=8,
        train_size=64,
        low_size=32,
        low_until_epoch=3,
        train_size_from_epoch=3,
        eval_size=64,
        evaluate_flips=True,
        shuffle_window=4,
        settings=replace(
            _SETTINGS, epochs=6, global_batch=16, micro_batch=16, eval_batch=80, ema_decay=0.98
        ),
        learning_rate=1.6,
        weight_decay=5e-4,
        warmup_epochs=1,
    )


def _full() -> ImagenetConfig:
    """Train the plain 90 epochs at 224 pixels, with a cosine schedule, in bfloat16."""
    return ImagenetConfig(
        num_threads=4,
        deterministic=False,
        settings=replace(_SETTINGS, precision="bfloat16", loader_workers="auto"),
    )


def _progressive(epochs: int, low_until: int, train_size_from: int) -> ImagenetConfig:
    """Follow ffcv-imagenet's rn50 configs, at a quarter of their batch and learning rate.

    For one GPU, it differs in two points: bfloat16 instead of float16, and blocks that start at 0.
    """
    return ImagenetConfig(
        num_threads=4,
        deterministic=False,
        blur_pool=True,
        train_size=192,
        low_size=160,
        low_until_epoch=low_until,
        train_size_from_epoch=train_size_from,
        evaluate_flips=True,
        settings=replace(
            _SETTINGS, epochs=epochs, schedule="linear", precision="bfloat16", loader_workers="auto"
        ),
        learning_rate=_FFCV_RATE * BASE_BATCH / _FFCV_BATCH,
        label_smoothing=0.1,
        warmup_epochs=2,
    )


RECIPES: Mapping[str, Callable[[], ImagenetConfig]] = MappingProxyType(
    {
        "laptop": _laptop,
        "full": _full,
        "epochs_16": lambda: _progressive(16, 11, 13),
        "epochs_40": lambda: _progressive(40, 29, 34),
        "epochs_88": lambda: _progressive(88, 65, 76),
    }
)
