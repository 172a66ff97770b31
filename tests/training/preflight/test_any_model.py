"""Any model is counted like a workload's stage; a config.json gives the published parameters."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.training.forked import in_fork
from training.errors import UserError
from training.preflight.footprint import StepFootprint, measure_step
from training.preflight.standalone import STANDS_IN, ModelStage, load_function
from training.preflight.transformer import Transformer, shape_of
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
# What the models' pages and papers state, to the last parameter.
PUBLISHED = {
    "gpt2": (GPT2, 124_439_808),
    "llama-2-7b": (LLAMA, 6_738_415_616),
    "mistral-7b": (
        {
            **LLAMA,
            "model_type": "mistral",
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
        },
        7_241_732_096,
    ),
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
    "gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 16384,
            "vocab_size": 256000,
        },
        2_506_172_416,
    ),
    "pythia-160m": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 50304,
        },
        162_322_944,
    ),
    "bert-base-uncased, masked": (BERT, 109_514_298),
    "roberta-base, masked": (
        {
            **BERT,
            "model_type": "roberta",
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
        },
        124_697_433,
    ),
    "distilbert-base, masked": (
        {
            "model_type": "distilbert",
            "dim": 768,
            "n_layers": 6,
            "n_heads": 12,
            "hidden_dim": 3072,
            "vocab_size": 30522,
            "max_position_embeddings": 512,
        },
        66_985_530,
    ),
    "vit-base-16, 1000 classes": (
        {
            "model_type": "vit",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "patch_size": 16,
            "image_size": 224,
        },
        86_567_656,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_gives_the_published_number_of_parameters(name: str) -> None:
    config, published = PUBLISHED[name]
    with torch.device("meta"):
        model = Transformer(shape_of(config))
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "model_type 't5' cannot be counted .* known are bert, distilbert"),
        ({}, "model_type None cannot be counted"),
        ({**GPT2, "n_layer": 0}, "n_layer is 0; give a whole number from 1"),
        ({**GPT2, "n_layer": True}, "n_layer is True; give a whole number"),
        ({**LLAMA, "vocab_size": -5}, "vocab_size is -5; give a whole number"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size is '64'; give a whole number"),
        ({**LLAMA, "hidden_size": None}, "hidden_size is None; give a whole number"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0; give a whole number"),
        ({**LLAMA, "num_hidden_layers": 10**8}, "100000000 layers .* check them"),
        ({**LLAMA, "model_type": "mixtral"}, "needs the key 'num_local_experts'"),
        (
            {
                **LLAMA,
                "model_type": "mixtral",
                "num_local_experts": 4,
                "num_experts_per_tok": 5,
            },
            "num_experts_per_tok is 5, of 4 experts",
        ),
        ([1, 2], "an object with a model_type"),
        ({**LLAMA, "num_key_value_heads": 5}, "32 heads do not share 5 heads of keys"),
        ({"model_type": "gpt2"}, "needs the key 'n_embd'"),
    ],
)
def test_fails_on_a_config_that_cannot_be_counted(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(config)


def counted(name: str, *, batch: int = 4, precision: str = "float32") -> StepFootprint:
    def count() -> StepFootprint:
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

    assert in_fork(count) == ((7, 64), STANDS_IN)


def test_a_model_that_reads_numbers_when_it_is_built_keeps_its_shared_matrix() -> None:
    found = counted("tied")
    assert found.parameters == 50 * 8
    assert found.parameter_bytes == 4 * 50 * 8


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "write package.module:function"),
        ("tests.no_such_module:model", "there is no module 'tests.no_such_module'"),
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
