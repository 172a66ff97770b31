"""Peers of the same shape: Hugging Face's models, and a plain one as nanoGPT has it.

B batch, T tokens, D width, N = B x T. Each is a function of tokens (B, T + 1) to the loss.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.growth.architecture import DenseBlock, ExpertBlock, ModelConfig

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


def plain(config: ModelConfig) -> tuple[nn.Module, LossOf]:
    """What one writes by hand: learned positions, fused query, key and value, experts in a loop."""
    model = _Plain(config)

    def loss(tokens: Tensor) -> Tensor:
        logits, balance = model(tokens[:, :-1])
        result: Tensor = BALANCE * balance
        return result + F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


class _Plain(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Embedding(2048, config.width)
        self.blocks = nn.ModuleList(_PlainBlock(config, block) for block in config.blocks)
        self.norm = nn.LayerNorm(config.width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embedding(tokens_BT) + self.places(places)
        balances = []
        for block in self.blocks:
            x_BTD, balance = block(x_BTD)
            balances.append(balance)
        return F.linear(self.norm(x_BTD), self.embedding.weight), torch.stack(balances).mean()


class _PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig, block: DenseBlock | ExpertBlock) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = _mlp(width, block.hidden) if isinstance(block, DenseBlock) else None
        if isinstance(block, ExpertBlock):
            self.router = nn.Linear(width, block.num_experts)
            self.top_k = block.top_k
            self.experts = nn.ModuleList(
                _mlp(width, block.hidden) for _ in range(block.num_experts)
            )

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        size, length, width = x_BTD.shape
        heads = (size, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = self.qkv(self.norms[0](x_BTD)).view(heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(y.transpose(1, 2).reshape(x_BTD.shape))
        y_BTD = self.norms[1](x_BTD)
        if self.ffn is not None:
            return x_BTD + self.ffn(y_BTD), x_BTD.new_zeros(())
        y_ND, balance = self._mixed(y_BTD.flatten(0, 1))
        return x_BTD + y_ND.view_as(x_BTD), balance

    def _mixed(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        shares_NE = self.router(x_ND).float().softmax(dim=-1)
        weights, chosen = shares_NE.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out_ND = torch.zeros_like(x_ND)
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            y = expert(x_ND[tokens]) * weights[tokens, place, None]
            out_ND.index_add_(0, tokens, y.to(out_ND.dtype))
        load = F.one_hot(chosen, len(self.experts)).float().sum(dim=1).mean(dim=0) / self.top_k
        return out_ND, len(self.experts) * (load * shares_NE.mean(dim=0)).sum()


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
