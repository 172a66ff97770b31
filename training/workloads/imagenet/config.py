"""The config of the imagenet recipes: everything that determines a run's numbers."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from training.checks import check_choice, check_fields
from training.workload import Settings

Architecture: TypeAlias = Literal["resnet8", "resnet18", "resnet50"]
# Sizes of a training image are multiples of it: the network halves them five times, and each size
# has compiled code of its own.
SIZE_STEP = 32
# The learning rate of a recipe is that of a batch of so many images.
BASE_BATCH = 256

SETTINGS = Settings(
    epochs=90,
    global_batch=1024,
    micro_batch=256,
    eval_batch=256,
    drop_last=True,
    evaluate_every_epochs=1,
    best_metric="top1",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagenetConfig:
    """Everything that determines a run's numbers, apart from data and machine.

    Images are trained on at `low_size` up to `low_until_epoch`, from there on at sizes that grow
    evenly to `train_size`, which `train_size_from_epoch` has. The learning rate is that of
    BASE_BATCH images and is scaled to `global_batch`.
    """

    seed: int = 0
    num_threads: int = 1
    deterministic: bool = True

    architecture: Architecture = "resnet50"
    num_classes: int = 1000
    blur_pool: bool = False

    train_size: int = 224
    low_size: int = 224
    low_until_epoch: int = 0
    train_size_from_epoch: int = 0
    eval_size: int = 224
    # Evaluates the mirrored image too, and gives what both together say beside the plain figures.
    evaluate_flips: bool = False
    shuffle_window: int = 16

    settings: Settings = SETTINGS
    learning_rate: float = 0.1
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
                0: ("momentum", "weight_decay", "warmup_epochs"),
                2: ("num_classes",),
            },
            above_0=("learning_rate",),
        )
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}; give at least 0 and less than 1"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
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

    @property
    def epochs(self) -> int:
        """The length, over whose epochs the images grow."""
        if self.settings.epochs is None:
            raise ValueError("epochs is None; give the number of epochs")
        return self.settings.epochs

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
