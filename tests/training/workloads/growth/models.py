"""Small language models for the tests."""

import torch
from torch import Tensor

from training.workloads.growth.config import Activation, DenseBlock, ExpertBlock, ModelConfig, Norm
from training.workloads.growth.model import LanguageModel

VOCABULARY = 32


def small_config(
    norm: Norm = "layer", activation: Activation = "gelu", is_tied: bool = True
) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCABULARY,
        width=16,
        num_heads=2,
        blocks=(DenseBlock(hidden=24), ExpertBlock(hidden=24, num_experts=4)),
        norm=norm,
        activation=activation,
        is_tied=is_tied,
    )


def small_model(config: ModelConfig | None = None, *, seed: int = 0) -> LanguageModel:
    """In double precision, with weights (biases and gains too) large enough that all matter."""
    torch.manual_seed(seed)
    model = LanguageModel(config or small_config()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def texts(num_texts: int = 3, num_tokens: int = 11, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, (B, T) each."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (num_texts, num_tokens + 1), generator=rng)
    return tokens[:, :-1], tokens[:, 1:]
