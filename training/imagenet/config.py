"""The config of the imagenet recipes, and these recipes with the accuracy that others published."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from training.workload import CompileMode, LoaderWorkers, Precision

ARCHITECTURES = ("resnet10", "resnet18", "resnet50")
# Sizes of a training image are multiples of it: the network halves them five times.
SIZE_STEP = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagenetConfig:
    """Everything that determines a run's numbers, apart from data and machine.

    Images are trained on at `low_size` up to `low_until_epoch`, from there on at sizes that grow
    evenly to `train_size`, which `train_size_from_epoch` has. The learning rate is that of a
    `global_batch` of 256 and is scaled with it.
    """

    seed: int = 0
    num_threads: int = 1
    deterministic: bool = True

    architecture: str = "resnet50"
    num_classes: int = 1000
    blur_pool: bool = False

    train_size: int = 224
    low_size: int = 224
    low_until_epoch: int = 0
    train_size_from_epoch: int = 0
    eval_size: int = 224
    # Evaluates the mirrored image too and averages, as some published figures do.
    evaluate_flips: bool = False
    shuffle_window: int = 16

    epochs: int = 90
    global_batch: int = 1024
    micro_batch: int = 256
    eval_batch: int = 256
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    label_smoothing: float = 0.0
    schedule: str = "cosine"
    warmup_epochs: int = 5
    ema_decay: float | None = None
    evaluate_every_epochs: int = 1
    precision: Precision = "float32"
    compile_mode: CompileMode | None = None

    # Processes that load ahead: changes no number, so another attempt may change it.
    loader_workers: LoaderWorkers = 0

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"architecture is {self.architecture!r}; give one of {known}")
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f"schedule is {self.schedule!r}; give cosine or linear")
        for name in ("num_threads", "shuffle_window", "epochs", "global_batch", "eval_batch"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if self.num_classes < 2:
            raise ValueError(f"num_classes is {self.num_classes}; give at least 2")
        for name in ("train_size", "low_size"):
            value = getattr(self, name)
            if value < SIZE_STEP or value % SIZE_STEP:
                raise ValueError(f"{name} is {value}; give a multiple of {SIZE_STEP}")
        if self.eval_size < SIZE_STEP:
            raise ValueError(f"eval_size is {self.eval_size}; give at least {SIZE_STEP}")
        if self.low_size > self.train_size:
            raise ValueError(
                f"low_size {self.low_size} is above train_size {self.train_size}; change one"
            )
        ramp = (self.low_until_epoch, self.train_size_from_epoch)
        if not 0 <= ramp[0] <= ramp[1] <= self.epochs:
            raise ValueError(
                f"low_until_epoch {ramp[0]} and train_size_from_epoch {ramp[1]}; give them in "
                f"order, up to the {self.epochs} epochs"
            )
        if self.warmup_epochs < 0:
            raise ValueError(f"warmup_epochs is {self.warmup_epochs}; give 0 or more")
        for name in ("learning_rate",):
            if (rate := getattr(self, name)) <= 0:
                raise ValueError(f"{name} is {rate}; give more than 0")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}; give at least 0 and less than 1"
            )

    def image_size(self, epoch: int) -> int:
        """The side of the images of an epoch; -1: of those that are evaluated."""
        if epoch < 0:
            return self.eval_size
        if epoch >= self.train_size_from_epoch:
            return self.train_size
        if epoch < self.low_until_epoch:
            return self.low_size
        done = (epoch - self.low_until_epoch) / (self.train_size_from_epoch - self.low_until_epoch)
        grown = self.low_size + done * (self.train_size - self.low_size)
        return round(grown / SIZE_STEP) * SIZE_STEP


def laptop() -> ImagenetConfig:
    """A small ResNet on the pictures that `data make` draws, in minutes on one CPU thread."""
    return ImagenetConfig(
        architecture="resnet10",
        num_classes=8,
        train_size=64,
        low_size=32,
        low_until_epoch=3,
        train_size_from_epoch=5,
        eval_size=64,
        shuffle_window=4,
        epochs=8,
        global_batch=32,
        micro_batch=32,
        eval_batch=64,
        weight_decay=5e-4,
        label_smoothing=0.1,
        warmup_epochs=1,
        ema_decay=0.98,
    )


def _progressive(epochs: int) -> ImagenetConfig:
    """FFCV's rn50 recipes: 160 pixels for two thirds of the epochs, growing to 192 from there."""
    return ImagenetConfig(
        num_threads=4,
        deterministic=False,
        blur_pool=True,
        train_size=192,
        low_size=160,
        low_until_epoch=round(epochs * 11 / 16),
        train_size_from_epoch=round(epochs * 13 / 16),
        # 256 in FFCV's configs, whose figures include the mirrored image.
        eval_size=224,
        epochs=epochs,
        learning_rate=0.10625,
        label_smoothing=0.1,
        schedule="linear",
        warmup_epochs=2,
        precision="bfloat16",
        loader_workers="auto",
    )


def epochs_16() -> ImagenetConfig:
    """FFCV's rn50 recipe of 16 epochs."""
    return _progressive(16)


def epochs_40() -> ImagenetConfig:
    """FFCV's rn50 recipe of 40 epochs."""
    return _progressive(40)


def epochs_88() -> ImagenetConfig:
    """FFCV's rn50 recipe of 88 epochs."""
    return _progressive(88)


def full() -> ImagenetConfig:
    """The plain 90 epochs at 224 pixels, in bfloat16."""
    return ImagenetConfig(
        num_threads=4, deterministic=False, precision="bfloat16", loader_workers="auto"
    )


RECIPES: Mapping[str, Callable[[], ImagenetConfig]] = MappingProxyType(
    {
        "laptop": laptop,
        "full": full,
        "epochs_16": epochs_16,
        "epochs_40": epochs_40,
        "epochs_88": epochs_88,
    }
)
# Others' top-1 with recipes like these, on ImageNet-1K: not measured here.
PUBLISHED_TOP1: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "full": (76.13, "torchvision ResNet50_Weights.IMAGENET1K_V1, 90 epochs"),
        "epochs_16": (73.8, "ffcv-imagenet rn50, 16 epochs, with mirrored images at 256 pixels"),
        "epochs_40": (77.2, "ffcv-imagenet rn50, 40 epochs, with mirrored images at 256 pixels"),
        "epochs_88": (78.4, "ffcv-imagenet rn50, 88 epochs, with mirrored images at 256 pixels"),
    }
)
