"""The three phases' models at several scales; every scale grows as the seed's does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from training.growth.architecture import DENSE, EXPERTS, GROWN, DenseBlock, ExpertBlock, ModelConfig

PHASES = ("dense", "experts", "grown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large the models are, and what a step takes."""

    models: Mapping[str, ModelConfig]  # by phase
    batch: int
    num_tokens: int

    @property
    def tokens_per_step(self) -> int:
        """Of one step."""
        return self.batch * self.num_tokens


def _shrunk(config: ModelConfig, by: int, vocab_size: int, num_heads: int) -> ModelConfig:
    blocks = tuple(replace(block, hidden=block.hidden // by) for block in config.blocks)
    heads = num_heads * config.num_heads // DENSE.num_heads
    return replace(
        config, vocab_size=vocab_size, width=config.width // by, num_heads=heads, blocks=blocks
    )


def _scale(by: int, vocab_size: int, num_heads: int, batch: int, num_tokens: int) -> Scale:
    models = zip(PHASES, (DENSE, EXPERTS, GROWN), strict=True)
    return Scale(
        models={name: _shrunk(model, by, vocab_size, num_heads) for name, model in models},
        batch=batch,
        num_tokens=num_tokens,
    )


SCALES: Mapping[str, Scale] = {
    # That the program runs; its figures are worth nothing.
    "tiny": _scale(26, 128, 2, 2, 16),
    # For CPUs: a quarter or an eighth of the width, in heads of 104 as in the seed.
    "eighth": _scale(8, 4096, 1, 4, 128),
    "quarter": _scale(4, 8192, 2, 4, 128),
    # The seed's own: batch 16 of 256 tokens.
    "full": Scale(
        models=dict(zip(PHASES, (DENSE, EXPERTS, GROWN), strict=True)), batch=16, num_tokens=256
    ),
}


def flops_per_step(config: ModelConfig, active: int, scale: Scale) -> float:
    """Of a step's products: 6 a parameter and token, and causal attention's (half of the square).

    Norms and biases, which are counted too, are a thousandth; what is computed twice is not.
    """
    untied = 0 if config.is_tied else config.vocab_size * config.width
    attention = 6 * len(config.blocks) * config.width * scale.num_tokens
    return float(scale.tokens_per_step * (6 * (active - untied) + attention))


def gated(config: ModelConfig) -> ModelConfig:
    """RMSNorm and SwiGLU as Mixtral has them, with two thirds of the units: as many weights."""
    blocks = tuple(_two_thirds(block) for block in config.blocks)
    return replace(config, norm="rms", activation="swiglu", blocks=blocks)


def _two_thirds(block: DenseBlock | ExpertBlock) -> DenseBlock | ExpertBlock:
    # A multiple of 16, which grouped products need.
    return replace(block, hidden=max(16, round(block.hidden * 2 / 3 / 16) * 16))
