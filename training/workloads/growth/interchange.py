"""Hugging Face's models of the same operations: GPT-NeoX, Llama with biases, Mixtral without."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from training.errors import UserError
from training.workloads.growth.config import DenseBlock, ExpertBlock, ModelConfig
from training.workloads.growth.model import LanguageModel

_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def write_hugging_face(m: nn.Module, out: Path) -> None:
    """A folder that `AutoModelForCausalLM.from_pretrained` loads: the same logits."""
    assert isinstance(m, LanguageModel)
    c, state = m.config, m.state_dict()
    kinds = {type(block) for block in c.blocks}
    if kinds == {DenseBlock} and (c.norm, c.activation) == ("layer", "gelu"):
        about, found = _neox(c, state)
    elif kinds == {DenseBlock} and (c.norm, c.activation) == ("rms", "swiglu"):
        about, found = _llama(c, state)
    elif kinds == {ExpertBlock} and (c.norm, c.activation) == ("rms", "swiglu"):
        about, found = _mixtral(c, state)
    else:
        raise UserError(
            f"Hugging Face has no model of {c.norm} norms, {c.activation} and "
            f"{' and '.join(sorted(kind.__name__ for kind in kinds))}s: dense blocks export with "
            "norm=layer activation=gelu or norm=rms activation=swiglu, experts with the latter"
        )
    common = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": len(c.blocks),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "head_dim": c.head_width,
        "max_position_embeddings": 2048,
        "rope_theta": c.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
        "tie_word_embeddings": c.is_tied,
        "dtype": "float32",
    }
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({**common, **about}, indent=1) + "\n")
    tensors = {name: tensor.clone().contiguous() for name, tensor in found.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _neox(c: ModelConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    found = {"gpt_neox.embed_in.weight": state["embedding.weight"]}
    found |= {"embed_out.weight": state["head.weight"]} if not c.is_tied else {}
    for kind in ("weight", "bias"):
        found[f"gpt_neox.final_layer_norm.{kind}"] = state[f"final_norm.{kind}"]
        for number in range(len(c.blocks)):
            old, new = f"blocks.{number}", f"gpt_neox.layers.{number}"
            # One layer there: query, key and value of the first head, then of the next.
            parts = [state[f"{old}.attention.{p}.{kind}"] for p in ("query", "key", "value")]
            by_head = torch.stack([p.unflatten(0, (c.num_heads, -1)) for p in parts], dim=1)  # type: ignore[no-untyped-call]
            found[f"{new}.attention.query_key_value.{kind}"] = by_head.flatten(0, 2)
            found[f"{new}.attention.dense.{kind}"] = state[f"{old}.attention.output.{kind}"]
            found[f"{new}.mlp.dense_h_to_4h.{kind}"] = state[f"{old}.ffn.up.{kind}"]
            found[f"{new}.mlp.dense_4h_to_h.{kind}"] = state[f"{old}.ffn.down.{kind}"]
            for ours, theirs in _NORMS.items():
                found[f"{new}.{theirs}.{kind}"] = state[f"{old}.{ours}.{kind}"]
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "intermediate_size": _hidden(c),
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope_base,
            "partial_rotary_factor": 1.0,
        },
    }, found


def _llama(c: ModelConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    found = _outside(c, state)
    for number in range(len(c.blocks)):
        old, new = f"blocks.{number}", f"model.layers.{number}"
        for kind in ("weight", "bias"):
            for ours, theirs in _PARTS.items():
                found[f"{new}.self_attn.{theirs}.{kind}"] = state[f"{old}.attention.{ours}.{kind}"]
            for part in ("gate", "up", "down"):
                found[f"{new}.mlp.{part}_proj.{kind}"] = state[f"{old}.ffn.{part}.{kind}"]
    biases = {"attention_bias": True, "mlp_bias": True}
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return {**about, **_rms(c), **biases}, found


def _mixtral(
    c: ModelConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if biased := [name for name, tensor in state.items() if "bias" in name and tensor.any()]:
        raise UserError(
            f"Mixtral has no biases, but {biased[0]} and {len(biased) - 1} more are not 0: train "
            "with --override has_biases=false, or export the phase dense, which Llama's biases fit"
        )
    found, block = _outside(c, state), c.blocks[0]
    assert isinstance(block, ExpertBlock)
    for number in range(len(c.blocks)):
        old, new = f"blocks.{number}", f"model.layers.{number}"
        for ours, theirs in _PARTS.items():
            found[f"{new}.self_attn.{theirs}.weight"] = state[f"{old}.attention.{ours}.weight"]
        moe, experts = f"{new}.block_sparse_moe", f"{old}.ffn.experts"
        found[f"{moe}.gate.weight"] = state[f"{old}.ffn.router.weight"]
        for name, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            for expert, weight in enumerate(state[f"{experts}.{name}_weight"]):
                found[f"{moe}.experts.{expert}.{theirs}.weight"] = weight
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": block.num_experts,
        "num_experts_per_tok": block.top_k,
        **_rms(c),
    }, found


def _outside(c: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is outside of attention and feed-forward networks, as Llama and Mixtral name it."""
    found = {"model.embed_tokens.weight": state["embedding.weight"]}
    found |= {"lm_head.weight": state["head.weight"]} if not c.is_tied else {}
    found["model.norm.weight"] = state["final_norm.weight"]
    for number in range(len(c.blocks)):
        for ours, theirs in _NORMS.items():
            weight = state[f"blocks.{number}.{ours}.weight"]
            found[f"model.layers.{number}.{theirs}.weight"] = weight
    return found


def _rms(c: ModelConfig) -> dict[str, Any]:
    return {"intermediate_size": _hidden(c), "hidden_act": "silu", "rms_norm_eps": 1e-5}


def _hidden(c: ModelConfig) -> int:
    sizes = {block.hidden for block in c.blocks}
    if len(sizes) > 1:
        raise UserError(f"blocks of {sorted(sizes)} hidden units: Hugging Face's have one number")
    return sizes.pop()
