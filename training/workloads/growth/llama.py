"""A Llama of Hugging Face's as the phase dense of a growth run.

python -m training.workloads.growth.llama FOLDER llama.safetensors
python -m training run --workload growth --init-from llama.safetensors ...

Grouped heads become one for each query, which computes the same; biases that it has not stay 0.
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
from torch import Tensor

from training.errors import EXIT_FINISHED, EXIT_USER, UserError

# What the model here has one value of: name, the value, Llama's default.
_FIXED = (
    ("rope_theta", 10_000.0, 10_000.0),
    ("rms_norm_eps", 1e-5, 1e-6),
    ("hidden_act", "silu", "silu"),
)
_LAYER = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a Llama as the weights of a dense model of ours, and the overrides that it needs."""
    parser = argparse.ArgumentParser(
        prog="python -m training.workloads.growth.llama",
        description="Turn a folder of Hugging Face's (config.json and safetensors) with a Llama "
        "into a file for `python -m training run --workload growth --init-from FILE`.",
    )
    parser.add_argument("folder", type=Path, help="as `save_pretrained` leaves it")
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    options = parser.parse_args(arguments)
    try:
        about, state = _read_llama(options.folder)
    except (UserError, OSError, ValueError, KeyError, SafetensorError) as error:
        print(
            f"{parser.prog}: {options.folder} cannot be read as a Llama: {error}", file=sys.stderr
        )
        return EXIT_USER
    save_file(state, options.out, metadata={"stage": "dense"})
    print(f"{options.out}: {len(state)} tensors; start the run with")
    print(" ".join(f"--override {name}={value}" for name, value in about.items()))
    return EXIT_FINISHED


def _read_llama(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The overrides of a config of the same shape, and the state of its dense model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check(config)
    theirs: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        theirs |= load_file(path)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    groups = heads // config.get("num_key_value_heads", heads)
    state = {
        "embedding.weight": theirs["model.embed_tokens.weight"].float(),
        "final_norm.weight": theirs["model.norm.weight"].float(),
    }
    is_tied = bool(config.get("tie_word_embeddings", False))
    if not is_tied:
        state["head.weight"] = theirs["lm_head.weight"].float()
    for number in range(layers):
        for name, ours in _LAYER.items():
            key, new = f"model.layers.{number}.{name}", f"blocks.{number}.{ours}"
            weight = theirs[f"{key}.weight"].float()
            bias = theirs.get(f"{key}.bias", torch.zeros(len(weight))).float()
            if groups > 1 and ours in ("attention.key", "attention.value"):
                weight, bias = (_for_each_query(t, heads // groups, groups) for t in (weight, bias))
            state[f"{new}.weight"] = weight.contiguous()
            if not ours.endswith("norm"):
                state[f"{new}.bias"] = bias.contiguous()
    return {
        "norm": "rms",
        "activation": "swiglu",
        "is_tied": str(is_tied).lower(),
        "has_biases": str(any(name.endswith(".bias") for name in theirs)).lower(),
        "vocab_size": config["vocab_size"],
        "width": config["hidden_size"],
        "hidden": config["intermediate_size"],
        "num_heads": heads,
        "num_layers": layers,
    }, state


def _check(config: Mapping[str, Any]) -> None:
    """UserError if it is no Llama, or one that computes what the model here does not."""
    if config.get("model_type") != "llama":
        raise UserError(f"it is a {config.get('model_type')!r}; give the folder of a Llama")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    flat = {**config, **{name: value for name, value in rope.items() if name == "rope_theta"}}
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"its positions are scaled ({rope['rope_type']}); give one without")
    for name, wanted, default in _FIXED:
        if (found := flat.get(name, default)) != wanted:
            raise UserError(f"its {name} is {found}; the model here has {wanted}")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if (config.get("head_dim") or width // heads) * heads != width:
        raise UserError(
            f"its head_dim is {config['head_dim']}; the model here has {width // heads}"
        )


def _for_each_query(tensor: Tensor, num_groups: int, size: int) -> Tensor:
    by_group: Tensor = tensor.unflatten(0, (num_groups, 1, -1))  # type: ignore[no-untyped-call]
    return by_group.expand(num_groups, size, *by_group.shape[2:]).flatten(0, 2)


if __name__ == "__main__":
    sys.exit(main())
