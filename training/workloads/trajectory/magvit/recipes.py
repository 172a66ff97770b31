"""The config of the MAGVIT recipes, and these recipes."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from training.settings import check_fields
from training.workload import Settings
from training.workloads.trajectory.clips import FRAME_SIZE, NUM_FRAMES
from training.workloads.trajectory.config import SETTINGS, RecipeConfig

# Tokens are kept as int16.
_MAX_CODES = 2**15
_MAGVIT_SETTINGS = replace(SETTINGS, epochs=6, eval_batch=32)


@dataclass(frozen=True, kw_only=True, slots=True)
class MagvitConfig(RecipeConfig):
    """The fields of MAGVIT recipes, besides the shared ones."""

    # Tokenizer. A token is 2x4x4 pixels with the patch stem; the full stem works at full resolution
    # and halves to 4x8x8.
    stem: Literal["patch", "full"] = "patch"
    tokenizer_width: int = 32
    # Levels of each dimension of a code: 15,360 codes (the FSQ paper's table for 2^14).
    levels: str = "8,8,8,6,5"
    # Extra weight of pixels that differ from the clip's mean image.
    motion_weight: float = 20.0
    tokenizer_epochs: int = 2
    tokenizer_learning_rate: float = 3e-3
    tokenizer_batch: int = 4

    # Transformer over tokens.
    masked_share: float = 0.25
    masked_weight: float = 0.1
    settings: Settings = _MAGVIT_SETTINGS

    def __post_init__(self) -> None:
        # Not super(): dataclass(slots=True) creates a new class that super() does not know.
        RecipeConfig.__post_init__(self)
        check_fields(
            self,
            at_least={1: ("tokenizer_width",), 0: ("motion_weight", "masked_weight")},
            above_0=("tokenizer_learning_rate",),
        )
        if len(self.num_levels) < 1 or min(self.num_levels) < 2:
            raise ValueError(f"levels is {self.levels!r}; give numbers from 2, as in 8,8,8,6,5")
        if self.num_codes > _MAX_CODES:
            raise ValueError(
                f"levels is {self.levels!r}, which makes {self.num_codes} codes; "
                f"give at most {_MAX_CODES}"
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
    def num_codes(self) -> int:
        """The number of different codes."""
        return math.prod(self.num_levels)

    @property
    def token_shape(self) -> tuple[int, int]:
        """Time steps, and cells per step, of a clip's tokens."""
        frames, pixels = (2, 4) if self.stem == "patch" else (4, 8)
        return NUM_FRAMES // frames, (FRAME_SIZE // pixels) ** 2

    @property
    def merged(self) -> int:
        """Tokens along height and width that the Transformer merges into one of its 8x8 places."""
        return 2 if self.stem == "patch" else 1


def magvit_laptop() -> MagvitConfig:
    """A few thousand clips on one CPU thread, in a few minutes per Train stage."""
    return MagvitConfig()


def magvit_full() -> MagvitConfig:
    """10,000 clips on one GPU: a full-resolution tokenizer with 4x8x8 pixels per token."""
    return MagvitConfig(
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
