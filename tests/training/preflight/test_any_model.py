"""Any model is counted like a workload's stage; a config.json gives the published parameters."""

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from contract.errors import UserError
from tests.training.forked import in_fork
from training.cli import measure
from training.cli.main import main
from training.preflight.footprint import _StepFootprint, measure_step
from training.preflight.standalone import _STANDS_IN, HuggingFace, ModelStage, load_function
from training.workload import Settings, Train

MODELS = "tests.training.preflight.models_to_count"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
OF_EACH_KIND = ("mixtral-8x7b", "t5-base", "vit-base-16, 1000 classes")
# What the models' pages and papers state, to the last parameter: a family of each kind.
PUBLISHED = {
    "gpt2": (GPT2, 124_439_808),
    "llama-2-7b": (LLAMA, 6_738_415_616),
    "mixtral-8x7b": (
        {
            **LLAMA,
            "model_type": "mixtral",
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    "qwen2-0.5b": (
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "t5-base": (
        {"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        222_903_552,
    ),
    "bert-base-uncased, masked": (BERT, 109_514_298),
    "vit-base-16, 1000 classes": (
        {
            "model_type": "vit",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "patch_size": 16,
            "image_size": 224,
            "num_labels": 1000,
        },
        86_567_656,
    ),
}


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    """Import it once, not in each fork; nor where other tests are collected."""
    importlib.import_module("transformers.initialization")
    importlib.import_module("transformers.modeling_utils")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], str]:
    def written(config: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return written


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.slow)
        for name in PUBLISHED
    ],
)
def test_a_config_gives_the_published_number_of_parameters(
    name: str, write: Callable[[Any], str]
) -> None:
    config, published = PUBLISHED[name]

    def count() -> int:
        with FakeTensorMode():
            model, _ = HuggingFace(write(config), tokens=None)(1)
        return sum(p.numel() for p in model.parameters())

    assert in_fork(count) == published


@pytest.mark.parametrize(
    ("config", "tokens", "message"),
    [
        ({"model_type": "nothing"}, None, "cannot read .* does not recognize this architecture"),
        ({}, None, "Should have a `model_type` key"),
        ([1, 2], None, "Should have a `model_type` key"),
        ({**GPT2, "n_layer": "x"}, None, "'n_layer' expected int, got str"),
        ({**LLAMA, "hidden_size": None}, None, "'hidden_size' expected int, got NoneType"),
        ({**LLAMA, "num_attention_heads": 0}, None, "division or modulo by zero"),
        (GPT2, 2000, "--tokens is 2000; this model has 1024 positions"),
        ({"model_type": "vit"}, 8, "--tokens is for text"),
        (WHISPER, None, "takes input_features, whose shape is not in a config"),
        ({"model_type": "sam"}, None, "cannot train model_type 'sam'"),
    ],
)
def test_fails_on_a_config_that_cannot_be_counted(
    config: Any, tokens: int | None, message: str, write: Callable[[Any], str]
) -> None:
    with pytest.raises(UserError, match=message):
        in_fork(lambda: HuggingFace(write(config), tokens=tokens))


def rows(target: str, *options: str) -> list[dict[str, Any]]:
    """What the command counts of one sample at once; of more it counts the same, for seconds."""
    out = Path(target).with_name("-".join(["counted", *options, ".json"]))
    command = ["count", target, "--batch", "1", "--out", str(out), *options]

    def act() -> int:
        measure.train_footprints = partial(measure.train_footprints, factors=(1,))
        return main(command)

    assert in_fork(act) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["footprints"]
    return found


# Small, with whole numbers: 2 layers of width 64, 1,000 words.
TINY = LLAMA | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
# Of a layer: four matrices of attention, three of the feed-forward; its norms beside them.
MATRICES, NORMS = 2 * (4 * 64 * 64 + 3 * 64 * 128), 2 * 2 * 64 + 64


def test_lora_trains_two_narrow_matrices_for_each_and_keeps_the_rest_in_half(
    write: Callable[[Any], str],
) -> None:
    row = rows(write(TINY), "--lora", "8", "--tokens", "32")[0]
    trained = 2 * 8 * (4 * (64 + 64) + 3 * (64 + 128))
    assert row["trainable_parameters"] == trained
    frozen = MATRICES + NORMS + 2 * 1000 * 64
    assert row["parameter_bytes"] == 2 * frozen + 4 * trained
    assert row["gradient_bytes"] == 4 * trained
    assert row["optimizer_bytes"] == pytest.approx(8 * trained, rel=0.01)
    # Adapters and their state are all that a checkpoint has.
    assert row["checkpoint_bytes"] == row["gradient_bytes"] + row["optimizer_bytes"]
    assert row["precision"] == "bfloat16"


@pytest.mark.slow
def test_qlora_keeps_the_frozen_matrices_in_four_bits(write: Callable[[Any], str]) -> None:
    row = rows(write(TINY), "--lora", "8", "--four-bit", "--tokens", "32")[0]
    assert row["buffer_bytes"] == pytest.approx(MATRICES * (0.5 + 1 / 64), rel=0.01)
    assert row["parameter_bytes"] == 2 * (NORMS + 2 * 1000 * 64) + 4 * row["trainable_parameters"]


def test_pure_bfloat16_and_eight_bits_of_state_need_less(write: Callable[[Any], str]) -> None:
    row = rows(write(TINY), "--pure", "--optimizer", "adamw-8bit", "--tokens", "32")[0]
    # Of 32 tokens a score of two bytes for each of 1,000 words, and the loss.
    assert row["output_bytes"] == 32 * 1000 * 2 + 4
    parameters = MATRICES + NORMS + 2 * 1000 * 64
    assert row["parameter_bytes"] == row["gradient_bytes"] == 2 * parameters
    # Two bytes for each, a float32 for 256 of either, and float32 of the norms.
    assert row["optimizer_bytes"] == pytest.approx(2 * parameters * (1 + 4 / 256), rel=0.01)


@pytest.mark.slow
def test_recomputation_keeps_less_and_computes_more(write: Callable[[Any], str]) -> None:
    deep = write({**TINY, "num_hidden_layers": 6, "vocab_size": 100})
    whole, again = rows(deep)[-1], rows(deep, "--recompute")[-1]
    assert again["peak_activation_bytes"] < whole["peak_activation_bytes"] / 2
    assert whole["flops_per_sample"] * 1.2 < again["flops_per_sample"]
    # What is computed again is moved again.
    assert again["kept_bytes"] > whole["kept_bytes"]


@pytest.mark.slow
def test_eager_attention_keeps_its_scores(write: Callable[[Any], str]) -> None:
    config = write(TINY)
    fused, eager = (rows(config, "--attention", kind)[-1] for kind in ("sdpa", "eager"))
    # At least the scores, heads x 512 x 512, of each layer and sample, in two bytes.
    scores = 2 * 4 * 512 * 512 * 2
    more = (eager["kept_bytes"] - fused["kept_bytes"]) / eager["micro_batch"]
    assert more > scores


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            {"model_type": "t5", "d_model": 64, "d_ff": 128, "num_layers": 2, "vocab_size": 1000},
            marks=pytest.mark.slow,
        ),
        {**TINY, "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2},
        pytest.param(
            {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param({**TINY, "model_type": "mamba", "state_size": 8}, marks=pytest.mark.slow),
    ],
)
def test_architectures_are_counted_by_their_own_library(
    config: Any, write: Callable[[Any], str]
) -> None:
    row = rows(write(config), "--tokens", "32")[0]
    assert row["loss"] == "the model's"
    assert row["flops_per_sample"] > 0 < row["kept_bytes"]


@pytest.mark.slow
def test_two_of_four_experts_compute_half_of_what_four_do(write: Callable[[Any], str]) -> None:
    experts = {**TINY, "model_type": "mixtral", "num_local_experts": 4}
    two, four = (
        rows(write({**experts, "num_experts_per_tok": count}), "--tokens", "32")[0]
        for count in (2, 4)
    )
    each = 3 * 2 * (3 * 64 * 128) * 32 * 2  # forward and twice backward, of two layers
    assert four["flops_per_sample"] - two["flops_per_sample"] == 2 * each


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["m:f", "--tokens", "8"], "are for transformers"),
        (["m:f", "--pure", "--precision", "float32"], "--pure is bfloat16, not float32"),
        (["m:f", "--four-bit"], "add --lora RANK"),
        (["m:f", "--lora", "8", "--pure"], "leave out --pure"),
        (["nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_fails_on_options_that_contradict_each_other(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["count", *options]) == 2
    assert message in capsys.readouterr().err


def counted(name: str, *, batch: int = 4, precision: str = "float32") -> _StepFootprint:
    def count() -> _StepFootprint:
        found = cast(Train, stage(name, batch, precision))
        return measure_step(found, SimpleNamespace(seed=0), batch)

    return in_fork(count)


def stage(name: str, batch: int = 4, precision: str = "float32") -> ModelStage:
    settings = Settings(
        epochs=1, global_batch=batch, micro_batch=batch, precision=cast(Any, precision)
    )
    return ModelStage(name, load_function(f"{MODELS}:{name}"), settings, "adamw")


def test_a_step_is_counted_with_gradients_and_adamw() -> None:
    found = counted("with_loss")
    assert found.parameters == 650
    assert found.gradient_bytes == 4 * 650
    assert found.optimizer_bytes == pytest.approx(8 * 650, abs=16)
    # A product and a sum are two; backward needs none for the input.
    assert found.flops_per_sample == 2 * 2 * 64 * 10


def test_an_example_batch_is_resized_and_a_loss_stands_in() -> None:
    def count() -> tuple[tuple[int, ...], str]:
        found = stage("linear")
        measure_step(cast(Train, found), SimpleNamespace(seed=0), 4)
        return tuple(found.example(7).shape), found.loss_is

    assert in_fork(count) == ((7, 64), _STANDS_IN)


def test_a_model_that_reads_numbers_when_it_is_built_keeps_its_shared_matrix() -> None:
    found = counted("tied")
    assert found.parameters == 50 * 8
    assert found.parameter_bytes == 4 * 50 * 8


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "write package.module:function"),
        ("tests.no_such_module:model", "no module is named 'tests.no_such_module'"),
        (f"{MODELS}:linaer", "did you mean 'linear'"),
    ],
)
def test_fails_on_a_function_that_does_not_exist(target: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_function(target)


def test_fails_on_a_function_that_returns_no_model() -> None:
    with pytest.raises(UserError, match=r"returns str; return \(model, batch\)"):
        in_fork(lambda: stage("nothing"))


def test_fails_on_a_loss_that_reads_data() -> None:
    with pytest.raises(UserError, match="let shapes alone decide what model and loss compute"):
        counted("reads")
