"""Models of transformers grow: grouped key and value heads, packed experts, an untied head."""

from typing import Any

import torch

from training.workloads.expansion import Layout, deepen, fill, observe, upcycle, verify, widen
from training.workloads.expansion.verify import _Observation

# Heads of queries, and of keys and values, grow alike: each group stays as it is.
LAYOUT = Layout(
    blocks="model.layers.*",
    tensors={
        "model.embed_tokens.weight": "vocabulary width",
        "lm_head.weight": "vocabulary <- width",
        "model.norm.weight": "width",
        "model.layers.*.input_layernorm.weight": "width",
        "model.layers.*.post_attention_layernorm.weight": "width",
        "model.layers.*.self_attn.q_proj.weight": "heads <- width",
        "model.layers.*.self_attn.k_proj.weight": "heads <- width",
        "model.layers.*.self_attn.v_proj.weight": "heads <- width",
        "model.layers.*.self_attn.o_proj.weight": "+width <- heads",
        "model.layers.*.mlp.gate_proj.weight": "hidden <- width",
        "model.layers.*.mlp.up_proj.weight": "hidden <- width",
        "model.layers.*.mlp.down_proj.weight": "+width <- hidden",
        "model.layers.*.mlp.gate.weight": "experts <- width",
        "model.layers.*.mlp.experts.gate_up_proj": "experts (2 hidden) <- width",
        "model.layers.*.mlp.experts.down_proj": "experts +width <- hidden",
    },
    experts={
        "model.layers.*.mlp.gate_proj.weight": "model.layers.*.mlp.experts.gate_up_proj",
        "model.layers.*.mlp.up_proj.weight": "model.layers.*.mlp.experts.gate_up_proj",
        "model.layers.*.mlp.down_proj.weight": "model.layers.*.mlp.experts.down_proj",
    },
    routers=["model.layers.*.mlp.gate.weight"],
)
ROUTER = "model.layers.*.mlp.gate"


def size(factor: int, blocks: int) -> dict[str, Any]:
    return {
        "initializer_range": 0.3,
        "rms_norm_eps": 1e-6,  # the two have other defaults of this and of the positions
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "vocab_size": 32,
        "hidden_size": 16 * factor,
        "intermediate_size": 24 * factor,
        "num_attention_heads": 4 * factor,
        "num_key_value_heads": 2 * factor,
        "num_hidden_layers": blocks,
    }


def seen(model: torch.nn.Module, router: str | None = ROUTER) -> _Observation:
    ids = torch.randint(32, (8, 7), generator=torch.Generator().manual_seed(1))
    return observe(model, lambda: model(ids[:, :-1]).logits, ids[:, 1:], router=router)


def test_a_llama_becomes_a_mixtral_that_grows_on() -> None:
    # Here: at the top of the file every process that collects tests would wait for it.
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**size(1, 2)))
    more = {"num_local_experts": 4, "num_experts_per_tok": 2}
    mixtral, wide = (MixtralForCausalLM(MixtralConfig(**size(n, 2), **more)) for n in (1, 2))
    fresh = mixtral.state_dict()
    fill(mixtral, upcycle(llama.state_dict(), LAYOUT, num_experts=4, fresh=fresh))
    found = verify(seen(llama, None), seen(mixtral), top_k=2)
    assert found.failures == ()
    assert found.max_logit > 1
    factors = {"width": 2, "heads": 2, "hidden": 2}
    fill(wide, widen(mixtral.state_dict(), LAYOUT, factors, split_noise=0.1))
    assert verify(seen(mixtral), seen(wide), top_k=2).failures == ()
    deep = MixtralForCausalLM(MixtralConfig(**size(2, 3), **more))
    fill(deep, deepen(wide.state_dict(), LAYOUT, after=[1]))
    assert verify(seen(wide), seen(deep), top_k=2).logit_difference == 0
