"""A wider model trains on as the smaller one would have: the same losses, step by step."""

import copy

import pytest
import torch
from torch import nn

from tests.training.workloads.expansion.models import (
    DENSE,
    EXPERTS,
    KINDS,
    SPARSE,
    TOP_K,
    Kind,
    adamw,
    clipping,
    seen,
    times,
    tokens,
    train,
)
from training.workloads.expansion import (
    adamw_scales,
    block_origins,
    clip_grad_norm,
    deepen,
    deepen_optimizer,
    fill,
    optimizer_state_by_name,
    set_optimizer_state,
    upcycle_optimizer,
    verify,
    widen,
    widen_optimizer,
)
from training.workloads.growth.model import LanguageModel

BEFORE, AFTER = range(6), range(6, 26)
MAX_NORM = 0.6


def differences(
    kind: Kind, factor: int, *, carries: bool = True, scales: bool = True, clips: str = ""
) -> list[float]:
    """By how much the losses of a widened model differ from those of the small one, trained on."""
    layout, small = kind.layout, kind.model([SPARSE, DENSE])
    large = kind.model([SPARSE, DENSE], factor, seed=1)
    first = adamw(small, layout, {})
    clip_small = clipping(small, layout, 1, MAX_NORM) if clips else lambda: None
    train(small, first, BEFORE, clip_small)
    fill(large, widen(small.state_dict(), layout, times(factor)))
    then = adamw(large, layout, times(factor) if scales else {})
    if carries:
        state = widen_optimizer(optimizer_state_by_name(first, small), layout, times(factor))
        set_optimizer_state(then, large, state)
    clip_large = clipping(large, layout, factor, MAX_NORM) if clips else lambda: None
    if clips == "torch":
        clip_large = lambda: nn.utils.clip_grad_norm_(large.parameters(), MAX_NORM)  # noqa: E731
    pairs = zip(
        train(small, first, AFTER, clip_small), train(large, then, AFTER, clip_large), strict=True
    )
    return [abs(a - b) for a, b in pairs]


@pytest.mark.parametrize(("kind", "factor"), [(KINDS[0], 2), (KINDS[1], 2), (KINDS[-1], 3)])
def test_with_its_state_carried_it_follows_the_small_models_losses(kind: Kind, factor: int) -> None:
    found = differences(kind, factor)
    print(f"x{factor} {kind}: losses of {len(found)} steps differ by at most {max(found):.1e}")
    assert max(found) <= 1e-9


def test_widened_twice_it_follows_too() -> None:
    kind = Kind()
    small, large, largest = (kind.model([DENSE], factor) for factor in (1, 2, 4))
    first = adamw(small, kind.layout, {})
    train(small, first, BEFORE)
    fill(large, widen(small.state_dict(), kind.layout, times(2)))
    fill(largest, widen(large.state_dict(), kind.layout, times(2)))
    # The rates are those of both factors multiplied.
    then = adamw(largest, kind.layout, times(4))
    state = widen_optimizer(optimizer_state_by_name(first, small), kind.layout, times(2))
    set_optimizer_state(then, largest, widen_optimizer(state, kind.layout, times(2)))
    own, found = train(small, first, AFTER), train(largest, then, AFTER)
    assert max(abs(a - b) for a, b in zip(own, found, strict=True)) <= 1e-9


def test_without_its_state_or_its_rates_it_does_not() -> None:
    assert max(differences(Kind(), 2, carries=False)) > 1e-2
    assert max(differences(Kind(), 2, scales=False)) > 1e-3


def test_clipped_by_the_norm_that_counts_copies_once_it_follows_too() -> None:
    found = max(differences(Kind(), 2, clips="weighted"))
    # What the engine's `clip_norm` does.
    other = max(differences(Kind(), 2, clips="torch"))
    print(f"clipped, copies counted once: {found:.1e}; as torch clips: {other:.1e}")
    assert found <= 1e-9
    assert other > 1e-4


def gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    ids = tokens(8)
    model.zero_grad()
    model.loss(ids[:, :-1], ids[:, 1:]).total.backward()
    return {name: own.grad for name, own in model.named_parameters() if own.grad is not None}


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]])
def test_every_gradient_is_the_small_ones_repeated_and_divided(kind: Kind) -> None:
    small, large = kind.model([SPARSE]), kind.model([SPARSE], 3)
    fill(large, widen(small.state_dict(), kind.layout, times(3)))
    own = gradients(small)
    # A first moment grows as a gradient does.
    as_state = {name: {"step": 1, "exp_avg": gradient} for name, gradient in own.items()}
    expected = widen_optimizer(as_state, kind.layout, times(3))
    found = gradients(large)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        wanted = expected[name]["exp_avg"]
        assert (gradient - wanted).norm() <= 1e-12 * wanted.norm(), name


def test_the_norm_is_the_small_models() -> None:
    kind = Kind()
    small, large = kind.model([SPARSE]), kind.model([SPARSE], 2)
    fill(large, widen(small.state_dict(), kind.layout, times(2)))
    gradients(small), gradients(large)
    norm = nn.utils.get_total_norm([p.grad for p in small.parameters() if p.grad is not None])
    found = clip_grad_norm(large.named_parameters(), kind.layout, times(2), 0.5)
    assert found.item() == pytest.approx(norm.item(), rel=1e-12)
    again = clip_grad_norm(large.named_parameters(), kind.layout, times(2), 0.5)
    assert again.item() == pytest.approx(0.5, rel=1e-5)


def test_rates_are_divided_where_values_are() -> None:
    kind = Kind()
    names = kind.model([SPARSE]).state_dict()
    scales = adamw_scales(names, kind.layout, times(2))
    up, router = scales["blocks.0.ffn.experts.up_weight"], scales["blocks.0.ffn.router.weight"]
    assert (up.learning_rate, up.weight_decay, up.eps) == (0.5, 2, 0.5)
    assert (router.learning_rate, router.weight_decay, router.eps) == (0.5, 2, 1)
    last, norm = scales["final_norm.weight"], scales["blocks.0.ffn_norm.weight"]
    assert (last.learning_rate, last.eps) == (0.5, 1)
    assert (norm.learning_rate, norm.eps) == (1, 0.5)
    untied = adamw_scales(["final_norm.weight"], Kind(is_tied=False).layout, times(2))
    assert untied["final_norm.weight"].learning_rate == 1


def test_moments_of_a_dense_layer_are_shared_out_to_its_experts() -> None:
    kind = Kind()
    dense = kind.model([DENSE])
    optimizer = adamw(dense, kind.layout, {})
    train(dense, optimizer, BEFORE)
    state = optimizer_state_by_name(optimizer, dense)
    grown = upcycle_optimizer(state, kind.layout, num_experts=EXPERTS, top_k=TOP_K)
    old, new = state["blocks.0.ffn.up.weight"], grown["blocks.0.ffn.experts.up_weight"]
    assert torch.equal(new["exp_avg"][3], old["exp_avg"] / EXPERTS)
    assert torch.equal(new["exp_avg_sq"][0], old["exp_avg_sq"] / (EXPERTS * TOP_K))
    assert new["step"] == old["step"]
    assert torch.equal(grown["embedding.weight"]["exp_avg"], state["embedding.weight"]["exp_avg"])
    assert "blocks.0.ffn.router.weight" not in grown
    sparse = kind.model([SPARSE])
    set_optimizer_state(adamw(sparse, kind.layout, {}), sparse, grown)  # names fit


def test_copies_that_warm_up_are_no_longer_told_apart_within_experts() -> None:
    kind = Kind()
    moments = torch.ones(12, 20)
    name = "blocks.0.ffn.down.weight"
    state = {name: {"step": 1, "exp_avg": moments, "exp_avg_sq": moments}}
    wide = widen_optimizer(state, kind.layout, times(2), rewarm_steps=5)
    grown = upcycle_optimizer(wide, kind.layout, num_experts=EXPERTS, top_k=TOP_K)
    # The first axis is now the experts'.
    assert "rewarm" in wide[name]
    assert set(grown["blocks.0.ffn.experts.down_weight"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_state_is_set_under_any_name_of_a_shared_parameter_and_refused_if_it_does_not_fit() -> (
    None
):
    wte, head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    head.weight = wte.weight
    model = nn.ModuleDict({"wte": wte, "head": head})
    optimizer = torch.optim.AdamW(model.parameters())
    ones = torch.ones(3, 2)
    own = {"step": torch.tensor(1.0), "exp_avg": ones, "exp_avg_sq": ones}
    set_optimizer_state(optimizer, model, {"head.weight": own})
    assert torch.equal(optimizer.state[wte.weight]["exp_avg"], ones)
    with pytest.raises(ValueError, match=r"the state has 'head.bias', but no parameter"):
        set_optimizer_state(optimizer, model, {"head.bias": own})
    with pytest.raises(ValueError, match=r"'exp_avg' of 'wte.weight' has grown to \(6, 2\)"):
        set_optimizer_state(optimizer, model, {"wte.weight": own | {"exp_avg": ones.tile(2, 1)}})


def test_without_any_gradient_there_is_nothing_to_clip() -> None:
    kind = Kind()
    assert clip_grad_norm(kind.model([DENSE]).named_parameters(), kind.layout, {}, 1.0) == 0


def test_new_blocks_start_without_state_and_learn() -> None:
    kind = Kind()
    model, deep = kind.model([DENSE, DENSE]), kind.model([DENSE] * 3)
    optimizer = adamw(model, kind.layout, {})
    train(model, optimizer, BEFORE)
    fill(deep, deepen(model.state_dict(), kind.layout, after=[0]))
    then = adamw(deep, kind.layout, {})
    state = optimizer_state_by_name(optimizer, model)
    grown = deepen_optimizer(state, kind.layout, num_blocks=2, after=[0])
    set_optimizer_state(then, deep, grown)
    old = state["blocks.1.ffn.up.weight"]
    assert torch.equal(grown["blocks.2.ffn.up.weight"]["exp_avg"], old["exp_avg"])
    assert not any(name.startswith("blocks.1.") for name in grown)
    before = copy.deepcopy(deep.state_dict())
    assert verify(seen(model), seen(deep, block_origins(2, [0]))).failures == ()
    train(deep, then, range(10, 13))
    still = [name for name, own in deep.state_dict().items() if torch.equal(own, before[name])]
    assert still == []
