"""The language model: its exact size, its first loss, causality, what its result depends on."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.workloads.growth.models import small_config, small_model, texts
from training.workloads.growth.config import (
    Activation,
    DenseBlock,
    ExpertBlock,
    ModelConfig,
    Norm,
    full,
    literal,
)
from training.workloads.growth.model import LanguageModel, _rotary_table, _rotated, parameter_counts

DENSE, EXPERTS, GROWN = full().dense_model, full().experts_model, full().grown_model
LITERAL = literal().grown_model


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (DENSE, 100_038_016, 100_038_016),
        (EXPERTS, 371_640_312, 138_878_328),
        (GROWN, 1_479_876_792, 549_178_296),
        (LITERAL, 2_155_790_296, 693_264_088),
    ],
)
def test_the_seeds_models_have_exactly_these_parameters(
    config: ModelConfig, total: int, active: int
) -> None:
    assert parameter_counts(config) == (total, active)


def test_the_new_blocks_stand_after_blocks_2_4_6_and_7() -> None:
    is_new = [isinstance(block, DenseBlock) for block in GROWN.blocks]
    assert [number for number, new in enumerate(is_new) if new] == [2, 5, 8, 10]
    assert GROWN.head_width == LITERAL.head_width == DENSE.head_width == 104


def test_the_first_loss_is_that_of_guessing() -> None:
    config = replace(DENSE, vocab_size=5000, blocks=(DenseBlock(hidden=64), ExpertBlock(hidden=64)))
    torch.manual_seed(0)
    model = LanguageModel(config)
    tokens = torch.randint(5000, (2, 65))
    with torch.no_grad():
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert 0 < loss.total.item() / 128 - math.log(5000) < 0.3
    assert 1.0 <= loss.balance < 1.5 and 1.0 <= loss.busiest < 4.0


@pytest.mark.parametrize(
    ("norm", "activation", "is_tied"), [("layer", "gelu", True), ("rms", "swiglu", False)]
)
def test_the_loss_is_the_cross_entropy_of_the_logits(
    norm: Norm, activation: Activation, is_tied: bool
) -> None:
    model = small_model(small_config(norm, activation, is_tied))
    tokens, targets = texts()
    total = model.loss(tokens, targets).total
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    parameters = list(model.parameters())
    assert_close(total, plain)
    for ours, theirs in zip(
        gradients(total, parameters), gradients(plain, parameters), strict=True
    ):
        assert_close(ours, theirs)


def test_no_token_sees_a_later_one() -> None:
    model = small_model()
    tokens, _ = texts(num_texts=1, num_tokens=9)
    before = model(tokens)
    tokens[0, 6] = (tokens[0, 6] + 1) % 32
    after = model(tokens)
    assert torch.equal(before[0, :6], after[0, :6])
    assert not torch.isclose(before[0, 6:], after[0, 6:]).all(dim=-1).any()


def test_attention_depends_on_the_distance_of_tokens_not_on_their_places() -> None:
    query, key = torch.randn(2, 1, 9, 1, 8, dtype=torch.float64).unbind()
    table = _rotary_table(20, 8, 10_000.0, query)
    scores = [
        torch.einsum("btnd,bsnd->ts", _rotated(query, part), _rotated(key, part))
        for part in (table[:9], table[11:])
    ]
    assert_close(*scores)
    assert not torch.allclose(scores[0], torch.einsum("btnd,bsnd->ts", query, key))


def test_recomputed_activations_give_the_same_bits() -> None:
    tokens, targets = texts()
    results = []
    for recompute in (False, True):
        model = small_model()
        model.recompute = recompute
        loss = model.loss(tokens, targets)
        results.append(
            [loss.total, *gradients(loss.total + loss.balance, list(model.parameters()))]
        )
    assert all(torch.equal(kept, again) for kept, again in zip(*results, strict=True))


def test_half_precision_stays_close_and_keeps_the_weights_gradients_in_full() -> None:
    model = small_model().float()
    tokens, targets = texts()
    exact = model.loss(tokens, targets).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = model.loss(tokens, targets).total
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=0.02)
    found = gradients(total, list(model.parameters()))
    assert {gradient.dtype for gradient in found} == {torch.float32}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "width 16 over num_heads 3"),
        ({"num_heads": 16}, "use a width that is an even multiple of num_heads"),
        ({"blocks": ()}, "the model has no block; use at least one"),
        ({"vocab_size": 0}, "vocab_size is 0; use at least 1"),
    ],
)
def test_fails_for_an_impossible_architecture(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(small_config(), **fields)  # type: ignore[arg-type]


def test_fails_for_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(ValueError, match="top_k is 3 of 2 experts; use 1 to 2"):
        ExpertBlock(hidden=8, num_experts=2, top_k=3)


def gradients(loss: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, parameters)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
