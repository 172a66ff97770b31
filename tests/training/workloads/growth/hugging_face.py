"""Hugging Face's models of the same shape.

B batch, T tokens, D width, N = B x T. Each is a function of tokens (B, T + 1) to the loss.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from training.workloads.growth.config import DenseBlock, ExpertBlock, ModelConfig

# The load-balance loss weighs this much beside the cross-entropy, for all contenders.
BALANCE = 0.01

LossOf = Callable[[Tensor], Tensor]


def hugging_face_dense(config: ModelConfig) -> tuple[nn.Module, LossOf]:
    """GPTNeoX: the same operations, weight by weight."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    blocks = [block for block in config.blocks if isinstance(block, DenseBlock)]
    rope = {"rope_type": "default", "rope_theta": config.rope_base, "partial_rotary_factor": 1.0}
    shape = GPTNeoXConfig(
        **_common(config),
        intermediate_size=blocks[0].hidden,
        use_parallel_residual=False,
        hidden_act="gelu",
        rope_parameters=rope,
    )
    return _causal(GPTNeoXForCausalLM(shape))


def hugging_face_experts(
    config: ModelConfig, experts: Literal["eager", "grouped_mm"]
) -> tuple[nn.Module, LossOf]:
    """Mixtral; Qwen3-MoE, which norms queries and keys too, where some blocks are dense."""
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    hidden = next(b.hidden for b in config.blocks if isinstance(b, ExpertBlock))
    dense = [number for number, b in enumerate(config.blocks) if isinstance(b, DenseBlock)]
    common = _common(config) | {
        "head_dim": config.head_width,
        "num_key_value_heads": config.num_heads,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": BALANCE,
        "experts_implementation": experts,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "rms_norm_eps": 1e-5,
    }
    if not dense:
        return _causal(MixtralForCausalLM(MixtralConfig(**common, intermediate_size=hidden)))
    shape = Qwen3MoeConfig(
        **common,
        moe_intermediate_size=hidden,
        intermediate_size=config.blocks[dense[0]].hidden,
        mlp_only_layers=dense,
        norm_topk_prob=True,
    )
    return _causal(Qwen3MoeForCausalLM(shape))


def _common(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.blocks),
        "num_attention_heads": config.num_heads,
        "tie_word_embeddings": config.is_tied,
        "use_cache": False,
        "max_position_embeddings": 2048,
        "attn_implementation": "sdpa",
    }


def _causal(model: Any) -> tuple[nn.Module, LossOf]:
    def loss(tokens: Tensor) -> Tensor:
        # Its own loss shifts the labels, and drops the last token's logits.
        targets = tokens[:, 1:].contiguous()
        found = model(input_ids=tokens[:, :-1], labels=targets, shift_labels=targets)
        result: Tensor = found.loss
        return result

    warnings.filterwarnings("ignore", module="transformers")
    return model, loss
