"""With the same weights, the model computes what Hugging Face's models compute.

GPTNeoX is the dense model operation by operation; Llama and Mixtral those of RMSNorm and SwiGLU.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from contract.errors import UserError
from tests.training.workloads.growth.models import small_config, small_model, texts
from training.cli.main import main
from training.registry import parse_overrides, resolve_config
from training.workloads.growth import hugging_face
from training.workloads.growth.config import Activation, Block, DenseBlock, ExpertBlock, Norm
from training.workloads.growth.growth_workload import GROWTH
from training.workloads.growth.hugging_face import write_hugging_face
from training.workloads.growth.model import LanguageModel

SPARSE = ExpertBlock(hidden=16, num_experts=4)


@pytest.mark.parametrize(
    ("norm", "activation", "blocks", "is_tied", "kind", "most_off"),
    [
        # Their rotary tables are in float32, whatever the model is in; so is Mixtral's router.
        ("layer", "gelu", [DenseBlock(hidden=24)] * 2, True, "gpt_neox", 1e-6),
        ("rms", "swiglu", [DenseBlock(hidden=24)] * 2, False, "llama", 1e-6),
        ("rms", "swiglu", [SPARSE] * 2, True, "mixtral", 1e-5),
        ("rms", "swiglu", [SPARSE, DenseBlock(hidden=24), SPARSE], False, "qwen2_moe", 1e-5),
    ],
)
def test_what_is_exported_gives_the_same_logits_and_loss(
    tmp_path: Path,
    norm: Norm,
    activation: Activation,
    blocks: list[Block],
    is_tied: bool,
    kind: str,
    most_off: float,
) -> None:
    """`from_pretrained` reads the folder as it does one of the hub's."""
    from transformers import AutoModelForCausalLM

    config = replace(small_config(norm, activation, is_tied), blocks=tuple(blocks))
    ours = small_model(config).float()
    if SPARSE in blocks:
        with pytest.raises(UserError, match=r"(Mixtral|Qwen2-MoE) has no biases, but blocks"):
            write_hugging_face(ours, tmp_path / "no", context=16)
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                if "bias" in name:
                    parameter.zero_()
    write_hugging_face(ours, tmp_path / "out", context=16)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, experts_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.config.model_type == kind
    assert theirs.config.max_position_embeddings == 16, "what it was trained to see"
    # Not transformers' 2, at which generation would stop: a quotation mark.
    assert theirs.generation_config.eos_token_id is None
    (tokens, targets), theirs = texts(), theirs.double().eval()
    with torch.no_grad():
        found, wanted = logits(theirs, tokens), ours.double()(tokens)
        torch.testing.assert_close(found, wanted, rtol=10 * most_off, atol=most_off)
        mean = ours.loss(tokens, targets).total / targets.numel()
        loss = theirs(input_ids=tokens, labels=tokens, shift_labels=targets.contiguous()).loss
        torch.testing.assert_close(loss.double(), mean, rtol=most_off, atol=most_off)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_llama_or_mixtral_becomes_a_phase_with_the_same_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Grouped heads, an output layer of its own, positions of another base; in several files."""
    theirs = small_llama(kind, vocab_size=32)
    theirs.save_pretrained(tmp_path / kind, max_shard_size="8KB")
    assert len(list((tmp_path / kind).glob("*.safetensors"))) > 1
    assert hugging_face.main([str(tmp_path / kind), str(tmp_path / "out.safetensors")]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    overrides = parse_overrides([word for word in said.split() if "=" in word])
    config = resolve_config(GROWTH, "laptop", overrides)
    assert config.has_biases == (kind == "llama") and config.rope_base == 5_000.0
    shape = config.dense_model if kind == "llama" else config.experts_model
    ours = LanguageModel(shape, initialize=False)
    ours.load_state_dict(load_file(tmp_path / "out.safetensors"))
    tokens, _ = texts()
    with torch.no_grad():
        found, wanted = ours(tokens), logits(theirs, tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    path = tmp_path / kind / "config.json"
    for name, value, sentence in (
        ("rms_norm_eps", 1e-6, "its rms_norm_eps is 1e-06; the model"),
        ("model_type", "gpt2", "it is a 'gpt2'; pass the folder of a Llama or a Mixtral"),
        ("rope_parameters", {"rope_type": "yarn"}, "its positions are scaled (yarn)"),
        ("sliding_window", 8, "its sliding_window is 8; the model here has None"),
        ("num_hidden_layers", 3, "it has no 'model.layers.2.self_attn.q_proj.weight'; `save_"),
    ):
        text = path.read_text()
        path.write_text(json.dumps({**json.loads(text), name: value}))
        assert hugging_face.main([str(tmp_path / kind), str(tmp_path / "no.safetensors")]) == 2
        assert sentence in capsys.readouterr().err
        path.write_text(text)


@pytest.mark.parametrize(("kind", "heads", "groups"), [("llama", 4, 4), ("mixtral", 16, 8)])
def test_a_null_stands_for_the_default_as_in_transformers(
    tmp_path: Path, kind: str, heads: int, groups: int
) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": heads, "num_key_value_heads": groups}
    small_llama(kind, 32, **shape).save_pretrained(tmp_path / kind)
    path = tmp_path / kind / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_key_value_heads": None}))
    assert hugging_face.main([str(path.parent), str(tmp_path / "out.safetensors")]) == 0
    read = load_file(tmp_path / "out.safetensors")
    assert read["blocks.0.attention.key.weight"].shape == (32, 32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mlp.gate_proj.weight": torch.float8_e4m3fn}, "quantized (torch.float8_e4m3fn); use"),
        ({"mlp.up_proj.weight": torch.int8}, "quantized (torch.int8); use the folder of"),
        (
            {"mlp.up_proj.weight_scale": None},
            "no place for model.layers.0.mlp.up_proj.weight_scale",
        ),
        ({"self_attn.q_norm.weight": None}, "no place for model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_fails_for_weights_that_mean_something_else_than_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    small_llama("llama", vocab_size=32).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    for name, dtype in changes.items():
        full = f"model.layers.0.{name}"
        tensors[full] = tensors[full].to(dtype) if dtype else torch.ones(1)
    save_file(tensors, path, metadata={"format": "pt"})
    out = tmp_path / "out.safetensors"
    assert hugging_face.main([str(tmp_path / "theirs"), str(out)]) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_transformers_does_not_read_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_tied: bool
) -> None:
    """A head that the config ties though it has its own values; other weights in the folder."""
    from transformers import AutoModelForCausalLM

    folder, out = tmp_path / "theirs", tmp_path / "out.safetensors"
    small_llama("llama", vocab_size=32).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": is_tied}))
    read = load_file(folder / "model.safetensors")
    beside = ("consolidated", "model-00001-of-00002", "zz", "adapter_model")
    for name in beside:
        twice = {key: tensor * 2 for key, tensor in read.items()} | {name: torch.ones(1)}
        save_file(twice, folder / f"{name}.safetensors")
    assert hugging_face.main([str(folder), str(out)]) == 2
    assert "the model here has no place for adapter_model and 0 more" in capsys.readouterr().err
    (folder / "adapter_model.safetensors").unlink()
    assert hugging_face.main([str(folder), str(out)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    overrides = parse_overrides([word for word in said.split() if "=" in word])
    ours = LanguageModel(resolve_config(GROWTH, "laptop", overrides).dense_model, initialize=False)
    ours.load_state_dict(load_file(out))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens, _ = texts()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), logits(theirs, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("missing", "place", "says"),
    [
        ("lm_head.weight", "out.safetensors", "it has no 'lm_head.weight'; `save_pretrained` it"),
        ("", "none/out.safetensors", "No such file or directory"),
    ],
)
def test_fails_for_weights_that_are_missing_or_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str, place: str, says: str
) -> None:
    small_llama("llama", vocab_size=32).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    left = {name: tensor for name, tensor in load_file(path).items() if name != missing}
    save_file(left, path)
    assert hugging_face.main([str(path.parent), str(tmp_path / place)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / place).exists()


def test_a_mixtral_goes_through_a_run_and_comes_out_with_the_same_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the documented commands; it learns next to nothing in its one step, and then grows."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    theirs = small_llama("mixtral", vocab_size=300)
    theirs.save_pretrained("mixtral")
    assert hugging_face.main(["mixtral", "mixtral.safetensors"]) == 0
    said = capsys.readouterr().out.splitlines()[-1].split()
    make = ["data", "make", "--workload=growth", "--out=data", "--count=60"]
    assert main([*make, "--override=vocab_size=300"]) == 0
    small = ["context=16", "learning_rate=1e-12", "experts_steps=1", "grown_steps=1", "num_shown=1"]
    small += ["micro_batch=2", "global_batch=2", "eval_windows=2", "sample_tokens=1"]
    run = ["run", "--workload=growth", "--recipe=laptop", "--dataset-uri=data", "--run-uri=run"]
    overrides = [f"--override={each}" for each in small]
    assert main([*run, "--init-from=mixtral.safetensors", *said, *overrides]) == 0
    said_by_run = capsys.readouterr().out
    weights = tmp_path / "mixtral.safetensors"
    assert f"[experts] starts with the weights of {weights}" in said_by_run
    assert "[grown] verification" in said_by_run and "PASSED" in said_by_run
    export = ["export", "--run-uri=run", "--checkpoint=2", "--format=huggingface", "--out=back"]
    assert main(export) == 0
    back = AutoModelForCausalLM.from_pretrained("back").eval()
    tokens, _ = texts()
    with torch.no_grad():
        torch.testing.assert_close(
            logits(back, tokens), logits(theirs, tokens), rtol=1e-4, atol=1e-4
        )


def test_fails_to_export_what_hugging_face_has_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model of layer norms, gelu and DenseBlock and Expert"):
        write_hugging_face(small_model(), tmp_path / "out", context=16)


def small_llama(kind: str, vocab_size: int, **more: int) -> Any:
    """transformers' model with random weights, biases (a Llama's) and gains."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(2)
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0},
        **more,
    }
    theirs: Any
    if kind == "llama":
        theirs = LlamaForCausalLM(LlamaConfig(**shape, attention_bias=True))
    else:
        theirs = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4))
    for name, parameter in theirs.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return theirs.eval()


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens).logits
    return found
