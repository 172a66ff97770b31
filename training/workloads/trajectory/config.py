"""Fields and checks that the configs of both kinds of recipes share."""

from dataclasses import dataclass, fields

from training.settings import check_choice, check_fields
from training.workload import Settings
from training.workloads.trajectory.clips import CLASSES

# The baseline's first layer has half its width, in four groups.
_BASELINE_MULTIPLE = 8
SETTINGS = Settings(
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

    # The dataset's classes, in its order; those of a dataset of one's own are in its manifest.
    classes: str = ",".join(CLASSES)

    # The Transformer.
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.1

    # Baseline: how far the mean image alone gets.
    time_average_epochs: int = 16
    baseline_width: int = 24

    # Training. The loss of the future position is multiplied by `position_weight`.
    settings: Settings = SETTINGS
    position_weight: float = 0.5
    num_shards: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    # The optimizer's work in one kernel, faster on a GPU; rounds differently.
    fused_optimizer: bool = False

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes, in the order of their labels."""
        return tuple(self.classes.split(","))

    def __post_init__(self) -> None:
        if len(set(self.class_names)) < 2 or not all(self.class_names):
            raise ValueError(f"classes is {self.classes!r}; give two or more names with commas")
        check_choice("precision", self.settings.precision, ("float32", "bfloat16"))
        epochs = [field.name for field in fields(self) if field.name.endswith("epochs")]
        check_fields(
            self,
            at_least={
                1: ("num_threads", "num_shards", "width", "num_layers", "num_heads", *epochs),
                0: ("position_weight", "weight_decay"),
                _BASELINE_MULTIPLE: ("baseline_width",),
            },
            above_0=("learning_rate",),
        )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; give at least 0 and less than 1")
        if self.baseline_width % _BASELINE_MULTIPLE:
            raise ValueError(
                f"baseline_width is {self.baseline_width}; give a multiple of {_BASELINE_MULTIPLE}"
            )
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}; change one"
            )
