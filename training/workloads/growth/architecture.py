"""What a language model is made of, apart from its weights."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from training.settings import check_fields

Norm: TypeAlias = Literal["layer", "rms"]
Activation: TypeAlias = Literal["gelu", "swiglu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseBlock:
    """A block with one feed-forward network of `hidden` units."""

    hidden: int

    def __post_init__(self) -> None:
        check_fields(self, at_least={1: ("hidden",)})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBlock:
    """A block with `num_experts` networks of `hidden` units, `top_k` of which see each token."""

    hidden: int
    num_experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        check_fields(self, at_least={1: ("hidden",)})
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k is {self.top_k} of {self.num_experts} experts; give 1 to {self.num_experts}"
            )


Block: TypeAlias = DenseBlock | ExpertBlock


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder with rotary positions. `is_tied`: the embedding is the output layer, too."""

    vocab_size: int
    width: int
    num_heads: int
    blocks: tuple[Block, ...]
    norm: Norm = "layer"
    activation: Activation = "gelu"
    is_tied: bool = True
    rope_base: float = 10_000.0

    @property
    def head_width(self) -> int:
        """Of every head; it stays the same while the model grows."""
        return self.width // self.num_heads

    def __post_init__(self) -> None:
        check_fields(self, at_least={1: ("vocab_size", "width", "num_heads")})
        if not self.blocks:
            raise ValueError("the model has no block; give at least one")
        if self.width % self.num_heads or self.head_width % 2:
            raise ValueError(
                f"width {self.width} over num_heads {self.num_heads}: rotary positions turn pairs "
                "of numbers within a head; give a width that is an even multiple of num_heads"
            )
