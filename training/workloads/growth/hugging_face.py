"""Hugging Face models with the same operations: GPT-NeoX, Llama with biases, and without them
Mixtral and, where dense blocks lie between those of experts, Qwen2-MoE.

python -m training.workloads.growth.hugging_face FOLDER weights.safetensors
python -m training run --workload growth --init-from weights.safetensors ...

A phase is written as one of them (`export --format huggingface`). A Llama is read as the dense
phase, a Mixtral as the experts phase: grouped heads become one per query, which computes the same,
and missing biases stay 0.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from contract.errors import Exit, UserError
from training.workloads.growth.config import Block, DenseBlock, ExpertBlock, ModelConfig
from training.workloads.growth.model import LanguageModel

# Kind -> the phase that it becomes, and the defaults of transformers for its config.
_KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("dense", {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6}),
    "mixtral": ("experts", {"rope_theta": 1e6, "rms_norm_eps": 1e-5}),
}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# Settings for which the model here supports only one value.
_FIXED = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": None}
_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
_LAYER = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    **_NORMS,
}
_DENSE = {"mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down"}
_ROUTER = {"block_sparse_moe.gate": "ffn.router"}
_OF_EXPERT = {"w1": "gate", "w2": "down", "w3": "up"}
# An architecture's name, where its experts are, and the names of their layers.
_MIXTRAL = ("Mixtral", "block_sparse_moe", _OF_EXPERT)
_QWEN = ("Qwen2-MoE", "mlp", {"gate_proj": "gate", "down_proj": "down", "up_proj": "up"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a Llama or Mixtral as a phase's weights; print the overrides that it needs."""
    parser = argparse.ArgumentParser(
        prog="python -m training.workloads.growth.hugging_face",
        description="Turn a Hugging Face folder (config.json and safetensors) with a Llama or a "
        "Mixtral into a file for `python -m training run --workload growth --init-from FILE`.",
    )
    parser.add_argument("folder", type=Path, help="as `save_pretrained` leaves it")
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    options = parser.parse_args(arguments)
    try:
        given = json.loads((options.folder / "config.json").read_text(encoding="utf-8"))
        # A null, which transformers writes and older files have, stands for the default.
        config = {name: value for name, value in given.items() if value is not None}
        stage, rope_base = _checked(config)
        about, state = _read(options.folder, config)
        save_file(state, options.out, metadata={"stage": stage})
    except (UserError, OSError, ValueError, KeyError, SafetensorError) as error:
        why = f"it has no {error}; `save_pretrained` it" if isinstance(error, KeyError) else error
        print(
            f"{parser.prog}: {options.folder} cannot become {options.out}: {why}",
            file=sys.stderr,
        )
        return Exit.USER
    about |= {"rope_base": rope_base}
    print(f"{options.out}: {len(state)} tensors of the {stage} phase; start the run with")
    print(" ".join(f"--override {name}={value}" for name, value in about.items()))
    return Exit.FINISHED


def _read(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return overrides for a config of the same shape, and the state of the phase's model."""
    theirs: dict[str, Tensor] = {}
    # As transformers does: there may be another copy in Meta's names. An adapter has no place here.
    for path in sorted(folder.glob("*model.safetensors")) or sorted(folder.glob("model-*-of-*")):
        theirs |= load_file(path)
    _refuse_quantized(theirs)
    has_biases = any(name.endswith(".bias") for name in theirs)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    num_experts = config.get("num_local_experts", 8) if config["model_type"] == "mixtral" else 0
    groups = heads // config.get("num_key_value_heads", 8 if num_experts else heads)
    state = {
        "embedding.weight": theirs.pop("model.embed_tokens.weight").float(),
        "final_norm.weight": theirs.pop("model.norm.weight").float(),
    }
    # A head of other values is not tied, whatever the config says: transformers does the same.
    tied = [state["embedding.weight"]] if config.get("tie_word_embeddings") else []
    head = theirs.pop("lm_head.weight", *tied).float()
    if not (is_tied := any(torch.equal(head, each) for each in tied)):
        state["head.weight"] = head
    for number in range(layers):
        old, new = f"model.layers.{number}", f"blocks.{number}"
        for name, ours in (_LAYER | (_ROUTER if num_experts else _DENSE)).items():
            weight = theirs.pop(f"{old}.{name}.weight").float()
            bias = theirs.pop(f"{old}.{name}.bias", torch.zeros(len(weight))).float()
            if groups > 1 and ours in ("attention.key", "attention.value"):
                weight, bias = (_for_each_query(t, heads // groups, groups) for t in (weight, bias))
            state[f"{new}.{ours}.weight"] = weight.contiguous()
            if not ours.endswith("norm"):
                state[f"{new}.{ours}.bias"] = bias.contiguous()
        for name, ours in _OF_EXPERT.items() if num_experts else ():
            of_expert = f"{old}.block_sparse_moe.experts.{{}}.{name}.weight"
            weights = [theirs.pop(of_expert.format(expert)) for expert in range(num_experts)]
            state[f"{new}.ffn.experts.{ours}_weight"] = weight = torch.stack(weights).float()
            state[f"{new}.ffn.experts.{ours}_bias"] = torch.zeros(weight.shape[:2])
    _refuse_leftover(theirs)
    about = {
        "norm": "rms",
        "activation": "swiglu",
        "is_tied": str(is_tied).lower(),
        "has_biases": str(has_biases).lower(),
        "vocab_size": config["vocab_size"],
        "width": config["hidden_size"],
        "hidden": config["intermediate_size"],
        "num_heads": heads,
        "num_layers": layers,
    }
    if num_experts:
        # The dense phase is trained for one step, its minimum, and then replaced.
        top_k = config.get("num_experts_per_tok", 2)
        about |= {"num_experts": num_experts, "top_k": top_k, "dense_steps": 1}
    return about, state


def _refuse_quantized(theirs: Mapping[str, Tensor]) -> None:
    """They are scaled by other tensors; as they are, they would be thousands of times too large."""
    if odd := {str(each.dtype) for each in theirs.values() if each.dtype not in _FLOATS}:
        raise UserError(
            f"its weights are quantized ({', '.join(sorted(odd))}); use the folder of the "
            "unquantized model, or load it with transformers, `dequantize()` it and "
            "`save_pretrained()`"
        )


def _refuse_leftover(theirs: Mapping[str, Tensor]) -> None:
    # Of older versions, computed from the rest.
    left = [name for name in theirs if not name.endswith("rotary_emb.inv_freq")]
    if left:
        raise UserError(
            f"the model here has no place for {left[0]} and {len(left) - 1} more of its tensors; "
            "pass one with the layers of transformers' own Llama or Mixtral"
        )


def _checked(config: Mapping[str, Any]) -> tuple[str, float]:
    """Return phase and rope_base; UserError for other models or unsupported settings."""
    if config.get("model_type") not in _KINDS:
        raise UserError(
            f"it is a {config.get('model_type')!r}; pass the folder of a Llama or a Mixtral"
        )
    stage, defaults = _KINDS[config["model_type"]]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    flat = {**defaults, **config, **{k: v for k, v in rope.items() if k == "rope_theta"}}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise UserError(f"its positions are scaled ({kind}); use a model without scaling")
    for name, wanted in _FIXED.items():
        if (found := flat.get(name, wanted)) != wanted:
            raise UserError(f"its {name} is {found}; the model here has {wanted}")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if (config.get("head_dim") or width // heads) * heads != width:
        raise UserError(
            f"its head_dim is {config['head_dim']}; the model here has {width // heads}"
        )
    return stage, float(flat["rope_theta"])


def _for_each_query(tensor: Tensor, num_groups: int, size: int) -> Tensor:
    by_group: Tensor = tensor.unflatten(0, (num_groups, 1, -1))  # type: ignore[no-untyped-call]
    return by_group.expand(num_groups, size, *by_group.shape[2:]).flatten(0, 2)


def write_hugging_face(m: nn.Module, out: Path, *, context: int) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, with the same logits.

    `context` is the number of tokens that it was trained to see.
    """
    assert isinstance(m, LanguageModel)
    c, state = m.config, m.state_dict()
    kinds = {type(block) for block in c.blocks}
    if kinds == {DenseBlock} and (c.norm, c.activation) == ("layer", "gelu"):
        about, found = _neox(c, state)
    elif kinds == {DenseBlock} and (c.norm, c.activation) == ("rms", "swiglu"):
        about, found = _llama(c, state)
    elif ExpertBlock in kinds and (c.norm, c.activation) == ("rms", "swiglu"):
        about, found = _sparse(c, state)
    else:
        raise UserError(
            f"Hugging Face has no model of {c.norm} norms, {c.activation} and "
            f"{' and '.join(sorted(kind.__name__ for kind in kinds))}s: dense blocks export with "
            "norm=layer activation=gelu or norm=rms activation=swiglu, experts, and dense blocks "
            "between them, with the latter"
        )
    common = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": len(c.blocks),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "head_dim": c.head_width,
        "max_position_embeddings": context,
        "rope_theta": c.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
        "tie_word_embeddings": c.is_tied,
        "dtype": "float32",
        # Not transformers' defaults, 1 and 2: in a byte-level vocabulary these are punctuation.
        "bos_token_id": None,
        "eos_token_id": None,
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
            # A single layer there: query, key and value of the first head, then of the next.
            parts = [state[f"{old}.attention.{p}.{kind}"] for p in ("query", "key", "value")]
            by_head = torch.stack([p.unflatten(0, (c.num_heads, -1)) for p in parts], dim=1)  # type: ignore[no-untyped-call]
            found[f"{new}.attention.query_key_value.{kind}"] = by_head.flatten(0, 2)
            found[f"{new}.attention.dense.{kind}"] = state[f"{old}.attention.output.{kind}"]
            found[f"{new}.mlp.dense_h_to_4h.{kind}"] = state[f"{old}.ffn.up.{kind}"]
            found[f"{new}.mlp.dense_4h_to_h.{kind}"] = state[f"{old}.ffn.down.{kind}"]
            for theirs, ours in _NORMS.items():
                found[f"{new}.{theirs}.{kind}"] = state[f"{old}.{ours}.{kind}"]
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "intermediate_size": _hidden(c.blocks),
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": False,
        # As before transformers 5.
        "rotary_pct": 1.0,
        "rotary_emb_base": c.rope_base,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope_base,
            "partial_rotary_factor": 1.0,
        },
    }, found


def _llama(c: ModelConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    biases = {"attention_bias": True, "mlp_bias": True}
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return {**about, **_rms(c.blocks), **biases}, _renamed(c, state, _LAYER | _DENSE)


def _sparse(
    c: ModelConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a Mixtral or, if dense blocks lie between those of experts, a Qwen2-MoE."""
    blocks = {n: block for n, block in enumerate(c.blocks) if isinstance(block, ExpertBlock)}
    dense, block = [n for n in range(len(c.blocks)) if n not in blocks], next(iter(blocks.values()))
    kind, place, names = _QWEN if dense else _MIXTRAL
    if biased := [name for name, tensor in state.items() if "bias" in name and tensor.any()]:
        raise UserError(
            f"{kind} has no biases, but {biased[0]} and {len(biased) - 1} more are not 0: train "
            "with --override has_biases=false, or export the dense phase as Llama, which has biases"
        )
    weights = {name: tensor for name, tensor in state.items() if not name.endswith("bias")}
    found = _renamed(c, weights, _LAYER | _DENSE | {f"{place}.gate": "ffn.router"})
    for new, number in ((f"model.layers.{number}.{place}", number) for number in blocks):
        for theirs, ours in names.items():
            of_all = state[f"blocks.{number}.ffn.experts.{ours}_weight"]
            found |= {f"{new}.experts.{n}.{theirs}.weight": each for n, each in enumerate(of_all)}
            if dense:  # a Qwen2-MoE has one more expert for all tokens; of zeros, it adds nothing
                one = of_all[0, :, :1] if ours == "down" else of_all[0, :1]
                found[f"{new}.shared_expert.{theirs}.weight"] = torch.zeros_like(one)
                found[f"{new}.shared_expert_gate.weight"] = torch.zeros(1, c.width)
    about = {"num_experts_per_tok": block.top_k, **_rms([*blocks.values()])}
    if not dense:
        named = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        return {**named, "num_local_experts": block.num_experts, **about}, found
    return {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        **about,
        "num_experts": block.num_experts,
        "norm_topk_prob": True,
        "mlp_only_layers": dense,
        "intermediate_size": _hidden([c.blocks[n] for n in dense]),
        "moe_intermediate_size": block.hidden,
        "shared_expert_intermediate_size": 1,
        "qkv_bias": False,
    }, found


def _renamed(
    c: ModelConfig, state: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Rename what Llama and Mixtral have in common, and the modules `names` of each block."""
    found = {"model.embed_tokens.weight": state["embedding.weight"]}
    found |= {"lm_head.weight": state["head.weight"]} if not c.is_tied else {}
    found["model.norm.weight"] = state["final_norm.weight"]
    for number in range(len(c.blocks)):
        for theirs, ours in names.items():
            for kind in ("weight", "bias"):
                if (tensor := state.get(f"blocks.{number}.{ours}.{kind}")) is not None:
                    found[f"model.layers.{number}.{theirs}.{kind}"] = tensor
    return found


def _rms(blocks: Sequence[Block]) -> dict[str, Any]:
    return {"intermediate_size": _hidden(blocks), "hidden_act": "silu", "rms_norm_eps": 1e-5}


def _hidden(blocks: Sequence[Block]) -> int:
    sizes = {block.hidden for block in blocks}
    if len(sizes) > 1:
        raise UserError(f"blocks have {sorted(sizes)} hidden units: Hugging Face supports only one")
    return sizes.pop()


if __name__ == "__main__":
    sys.exit(main())
