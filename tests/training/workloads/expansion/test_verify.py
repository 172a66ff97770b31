"""What a wrong growth looks like to `verify`: by how much, and in which words."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.workloads.expansion.models import (
    DENSE,
    EXPERTS,
    HIDDEN,
    SPARSE,
    TOP_K,
    Kind,
    seen,
    times,
    tokens,
)
from training.workloads.expansion import (
    block_origins,
    deepen,
    fill,
    observe,
    upcycle,
    verify,
    widen,
)
from training.workloads.expansion.verify import _Observation
from training.workloads.growth.config import ExpertBlock

KIND = Kind()
PAGE = Path(__file__).parents[4] / "docs" / "expansion.md"
State = dict[str, Tensor]


def assert_documented(wrong: str, difference: float) -> None:
    """The page says how far logits then differ."""
    row = re.search(rf"\| {re.escape(wrong)} \| (\S+) \|", PAGE.read_text())
    assert row is not None
    stated = float(row[1])
    assert difference < 1e-12 if stated < 1e-12 else 0.9 < difference / stated < 1.1


def as_it_is(state: State) -> State:
    return state


def no_division_in_the_last_norm(state: State) -> State:
    return {n: 2 * t if n.startswith("final_norm") else t for n, t in state.items()}


def embedding_halved_instead_of_the_last_norm(state: State) -> State:
    state = no_division_in_the_last_norm(state)
    return state | {"embedding.weight": state["embedding.weight"] / 2}


def readers_not_divided(state: State) -> State:
    return {n: 2 * t if "ffn.experts.up_weight" in n else t for n, t in state.items()}


def router_bias_divided(state: State) -> State:
    return {n: t / 2 if n.endswith("router.bias") else t for n, t in state.items()}


def noise_on_rows(state: State) -> State:
    """Plus on the first copies of a row, minus on the second."""
    name = "blocks.0.ffn.experts.up_weight"
    first, second = state[name].chunk(2, dim=1)
    noise = 0.1 * first.std() * torch.randn(first.shape, dtype=first.dtype)
    return state | {name: torch.cat([first + noise, second - noise], dim=1)}


def zero_router(state: State) -> State:
    return {n: torch.zeros_like(t) if ".router." in n else t for n, t in state.items()}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (as_it_is, "nothing (the right way)"),
        (no_division_in_the_last_norm, "the last norm not divided, under a tied head"),
        (embedding_halved_instead_of_the_last_norm, "the tied embedding halved instead"),
        (readers_not_divided, "one reader not divided"),
        (router_bias_divided, "the router's bias divided"),
        (noise_on_rows, "noise on rows, plus on one copy and minus on the other"),
        (zero_router, "the router zero when widened"),
    ],
)
def test_each_way_to_widen_wrongly_is_caught(change: Callable[[State], State], wrong: str) -> None:
    small, large = KIND.model([SPARSE] * 2), KIND.model([SPARSE] * 2, 2)
    fill(large, change(dict(widen(small.state_dict(), KIND.layout, times(2)))))
    found = verify(seen(small), seen(large), top_k=TOP_K)
    print(f"{change.__name__}: {found.logit_difference:.2g} of {found.max_logit:.2g}")
    assert_documented(wrong, found.logit_difference)
    assert bool(found.failures) == (change is not as_it_is)
    if found.failures:
        assert "the grown model computes another function" in found.failures[0]


def test_a_copied_block_that_adds_again_is_caught() -> None:
    """As in G_stack, whose copies of blocks keep what they add."""
    small, deep = KIND.model([SPARSE] * 2), KIND.model([SPARSE] * 3)
    state = dict(deepen(small.state_dict(), KIND.layout, after=[1]))
    for name in list(state):
        if name.startswith("blocks.2."):
            state[name] = state[name.replace("blocks.2.", "blocks.1.")]
    fill(deep, state)
    found = verify(seen(small), seen(deep, block_origins(2, [1])), top_k=TOP_K)
    print(f"copies that add: {found.logit_difference:.2g} of {found.max_logit:.2g}")
    assert_documented("a copied block that adds, as in G_stack", found.logit_difference)
    assert len(found.failures) == 2
    assert found.num_rerouted_texts == 0  # the old blocks, before the copy, are as they were


def test_experts_whose_weights_do_not_sum_to_one_are_caught() -> None:
    dense, small = KIND.model([DENSE]), KIND.model([SPARSE])
    state = dict(
        upcycle(dense.state_dict(), KIND.layout, num_experts=EXPERTS, fresh=small.state_dict())
    )
    # As with the softmax over all experts, not renormalised over those chosen.
    down = "blocks.0.ffn.experts.down_weight"
    fill(small, state | {down: state[down] * 0.8})
    assert verify(seen(dense), seen(small), top_k=TOP_K).logit_difference > 1e-2


def test_a_router_that_starts_at_zero_is_refused_though_the_function_is_the_same() -> None:
    dense, small = KIND.model([DENSE]), KIND.model([SPARSE])
    grown = upcycle(dense.state_dict(), KIND.layout, num_experts=EXPERTS, fresh=small.state_dict())
    fill(small, zero_router(dict(grown)))
    found = verify(seen(dense), seen(small), top_k=TOP_K)
    assert found.logit_difference < 1e-12
    assert found.smallest_margin == 0
    (failure,) = found.failures
    assert failure.startswith(
        "the router of block 0 does not tell its experts apart for 128 of 128"
    )


NUM_TEXTS, NUM_TOKENS = 4, 2
ROUTER = torch.tensor([3.0, 2.0, 1.0]).repeat(NUM_TEXTS, NUM_TOKENS, 1)


def observed(
    router: Tensor = ROUTER, *, later: Tensor = ROUTER, logits: float = 0.0, loss: float = 1.0
) -> _Observation:
    shape = (NUM_TEXTS, NUM_TOKENS)
    return _Observation(
        logits_BTV=torch.full((*shape, 5), logits),
        losses_BT=torch.full(shape, loss),
        routers={0: router, 1: later},
    )


def changed(text: int, values: list[float]) -> Tensor:
    router = ROUTER.clone()
    router[text, 0] = torch.tensor(values)
    return router


def test_a_near_tie_may_flip_and_its_text_is_not_judged() -> None:
    rounding = torch.tensor([0.0, 1e-5, 0.0])
    before = observed(changed(2, [2.0, 1.99995, 0.0]))
    flipped = changed(2, [1.99995, 2.0, 0.0]) + rounding
    # What follows in that text goes elsewhere by far, and so do its logits and losses.
    after = observed(flipped, later=changed(2, [0.0, 0.0, 9.0]))
    after.logits_BTV[2] += 1
    after.losses_BT[2] += 1
    found = verify(before, after)
    assert found.failures == ()
    assert (found.num_texts, found.num_rerouted_texts) == (4, 1)
    assert (found.num_routings, found.num_near_ties) == (16, 1)
    assert found.router_difference == pytest.approx(1e-5, rel=0.1)
    assert found.facts["texts_rerouted"] == 1


def test_a_routing_that_changes_beyond_rounding_is_a_failure() -> None:
    (failure,) = verify(observed(), observed(changed(1, [2.4, 2.6, 1.0]))).failures
    assert failure.startswith("block 0 sends 1 of 8 tokens to other experts, with margins up to 1")


def test_a_router_whose_logits_differ_is_caught_though_those_chosen_are_the_same() -> None:
    """Otherwise it would itself raise the limit up to which a margin is a near-tie."""
    worse = ROUTER - torch.tensor([0.0, 0.0, 5.0])
    worse[1] = torch.tensor([1.0, 2.0, 1.0])
    failures = verify(observed(), observed(worse)).failures
    assert failures[0].startswith("router logits differ by up to 5, where 0.0003 could be rounding")


def test_the_router_is_judged_even_where_experts_are_still_the_same() -> None:
    dense, small, large = KIND.model([DENSE]), KIND.model([SPARSE]), KIND.model([SPARSE], 2)
    fresh = small.state_dict()
    fill(small, upcycle(dense.state_dict(), KIND.layout, num_experts=EXPERTS, fresh=fresh))
    router = "blocks.0.ffn.router.weight"
    state = dict(widen(small.state_dict(), KIND.layout, times(2)))
    fill(large, state | {router: state[router] * 1.001})
    found = verify(seen(small), seen(large), top_k=TOP_K)
    assert found.logit_difference < 1e-12
    (failure,) = found.failures
    assert failure.startswith("router logits differ")


def test_where_every_expert_is_chosen_there_is_no_near_tie() -> None:
    block = ExpertBlock(hidden=HIDDEN, num_experts=2, top_k=2)
    small, large = KIND.model([block]), KIND.model([block], 2)
    fill(large, widen(small.state_dict(), KIND.layout, times(2)))
    found = verify(seen(small), seen(large), top_k=2)
    assert found.failures == ()
    assert (found.smallest_margin, found.num_near_ties) == (None, 0)


def test_texts_that_all_go_elsewhere_are_a_failure() -> None:
    failures = verify(observed(), observed(ROUTER.flip(-1), logits=1.0)).failures
    assert failures[0].startswith("logits differ by up to 1, where")
    assert failures[2].startswith("in 4 of 4 texts tokens went to other experts: too few are left")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (observed(logits=1e-3), "logits differ by up to 0.001, where 0.0001 could be rounding"),
        (observed(logits=float("nan")), "logits differ by up to nan"),
        (observed(loss=1.1), "the loss on the same batch differs by 0.1"),
    ],
)
def test_failures_are_sentences(after: _Observation, said: str) -> None:
    assert any(failure.startswith(said) for failure in verify(observed(), after).failures)


def test_the_tolerance_is_larger_for_large_logits() -> None:
    before = observed(logits=50.0)
    assert verify(before, observed(logits=50.004)).failures == ()
    assert verify(before, observed(logits=50.01)).failures


def test_bfloat16_in_which_a_wrong_growth_looks_like_rounding_is_refused() -> None:
    model = KIND.model([DENSE]).bfloat16()
    with pytest.raises(ValueError, match=r"logits are torch.bfloat16, .* use model.float\(\)"):
        seen(model)


def test_the_model_is_observed_in_eval_mode_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9), nn.Dropout(0.9).eval())
    x = torch.ones(5, 3)
    target = torch.zeros(5, dtype=torch.long)
    first, second = (observe(model, lambda: model(x), target) for _ in range(2))
    assert torch.equal(first.logits_BTV, second.logits_BTV)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert not model[0]._forward_hooks


def test_fails_where_routers_saw_other_tokens_than_there_are_logits() -> None:
    model, ids = KIND.model([SPARSE]), tokens()
    with pytest.raises(ValueError, match="saw 36 tokens, but forward returned logits of 32"):
        observe(model, lambda: model(ids)[:, :-1], ids[:, 1:], router="blocks.*.ffn.router")


def test_fails_for_routers_that_are_not_there_or_not_called() -> None:
    model = KIND.model([SPARSE])
    ids = tokens()
    with pytest.raises(ValueError, match=r"no module of the model is called"):
        observe(model, lambda: model(ids), ids, router="blocks.*.gate")
    with pytest.raises(ValueError, match=r"forward called 0 of the 1 modules"):
        observe(
            model, lambda: torch.zeros(4, 9, 2), torch.zeros_like(ids), router="blocks.*.ffn.router"
        )
