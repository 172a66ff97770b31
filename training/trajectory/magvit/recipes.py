"""The config of the MAGVIT recipes and the recipes, a function each."""

from dataclasses import dataclass, fields

from training.trajectory.clips import FRAME_SIZE, NUM_FRAMES
from training.trajectory.recipes import PRECISIONS, check_at_least, check_choice
from training.workload import Precision

STEMS = ("patch", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class MagvitConfig:
    """Everything that decides the numbers of a run, apart from data and machine."""

    seed: int = 0
    num_threads: int = 1
    deterministic: bool = True

    # Tokenizer. The patch stem makes 2x4x4 pixels a token; the full stem works at full resolution
    # and halves to 4x8x8.
    stem: str = "patch"
    tokenizer_width: int = 32
    # Levels of each dimension of a code: 15,360 codes (the FSQ paper's table for 2^14).
    levels: str = "8,8,8,6,5"
    # How much more a pixel counts that differs from the clip's mean image.
    motion_weight: float = 20.0
    tokenizer_epochs: int = 2
    tokenizer_learning_rate: float = 3e-3

    # Transformer over tokens.
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.1
    masked_share: float = 0.25
    masked_weight: float = 0.1
    epochs: int = 6
    learning_rate: float = 2e-3
    position_weight: float = 0.5

    # Baseline.
    time_average_epochs: int = 16
    baseline_width: int = 24

    # Training.
    num_shards: int = 16
    tokenizer_batch: int = 4
    global_batch: int = 16
    micro_batch: int = 16
    eval_batch: int = 32
    weight_decay: float = 0.05
    warmup_steps: int = 40
    clip_norm: float = 1.0
    evaluate_every_epochs: int = 1
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        check_choice("stem", self.stem, STEMS)
        check_choice("precision", self.precision, PRECISIONS)
        epochs = [f.name for f in fields(self) if f.name.endswith("epochs")]
        sizes = ("num_threads", "tokenizer_width", "width", "num_layers", "num_heads", "num_shards")
        for name in (*sizes, *epochs):
            check_at_least(name, getattr(self, name), 1)
        for name in ("motion_weight", "masked_weight", "position_weight"):
            check_at_least(name, getattr(self, name), 0.0)
        if len(self.num_levels) < 1 or min(self.num_levels) < 2:
            raise ValueError(f"levels is {self.levels!r}; give numbers from 2, as in 8,8,8,6,5")
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} is no multiple of twice num_heads {self.num_heads}; change one"
            )
        if not 0.0 <= self.masked_share < 1.0:
            raise ValueError(f"masked_share is {self.masked_share}; give at least 0, less than 1")

    @property
    def num_levels(self) -> tuple[int, ...]:
        """The levels of each dimension of a code."""
        try:
            return tuple(int(level) for level in self.levels.split(","))
        except ValueError as error:
            raise ValueError(
                f"levels is {self.levels!r}; give numbers from 2, as in 8,8,8,6,5"
            ) from error

    @property
    def token_shape(self) -> tuple[int, int]:
        """Steps in time and cells of a clip's tokens."""
        frames, pixels = (2, 4) if self.stem == "patch" else (4, 8)
        return NUM_FRAMES // frames, (FRAME_SIZE // pixels) ** 2

    @property
    def merged(self) -> int:
        """Tokens along height and width that the Transformer takes as one place: 8x8 places."""
        return 2 if self.stem == "patch" else 1


def magvit_laptop() -> MagvitConfig:
    """Some thousand clips on one CPU thread, in some minutes for each training."""
    return MagvitConfig()


def magvit_full() -> MagvitConfig:
    """10,000 clips on one GPU: a full-resolution tokenizer of 4x8x8 pixels a token."""
    return MagvitConfig(
        num_threads=4,
        deterministic=False,
        stem="full",
        tokenizer_epochs=20,
        tokenizer_learning_rate=1e-3,
        width=192,
        num_layers=6,
        num_heads=6,
        epochs=40,
        learning_rate=5e-4,
        time_average_epochs=40,
        baseline_width=64,
        num_shards=20,
        warmup_steps=500,
        evaluate_every_epochs=2,
        precision="bfloat16",
    )
