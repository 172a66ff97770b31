"""How a layout's lines are read, and what is said of one that does not fit."""

import pytest
import torch
from torch import nn

from tests.training.workloads.expansion.models import DENSE, KINDS, SPARSE, Kind, times
from training.workloads.expansion import (
    Layout,
    deepen,
    evenly_after,
    fill,
    upcycle,
    upcycle_optimizer,
    widen,
    widen_optimizer,
)
from training.workloads.expansion.layout import _Axis


def test_axes_stand_in_the_tensors_order_on_either_side_of_the_arrow() -> None:
    layout = Layout(
        tensors={
            "a": "experts +width <- hidden",
            "b": "width -> (3 heads)",
            "h.*.c": "+width",
            "d": "vocabulary width",
        }
    )
    assert layout.of("a", 3).axes == (
        _Axis(dimension="experts", is_read=False),
        _Axis(dimension="width", is_read=False),
        _Axis(dimension="hidden", is_read=True),
    )
    assert layout.of("b", 2).axes == (
        _Axis(dimension="width", is_read=True),
        _Axis(dimension="heads", is_read=False, parts=3),
    )
    assert [layout.of(name).adds for name in ("a", "b", "h.12.c", "d")] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_language_models_layout_knows_each_of_its_tensors(kind: Kind) -> None:
    for name, tensor in kind.model([DENSE, SPARSE]).state_dict().items():
        kind.layout.of(name, tensor.ndim)


@pytest.mark.parametrize(
    "text", ["<-", "width <-> heads", "width < heads", "(heads)", "3 x heads <- width", "+a <- +b"]
)
def test_fails_for_axes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="layout of 'w': cannot read"):
        Layout(tensors={"w": text})


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (lambda: Layout(tensors={"a": "width"}, divided=["b"]), "'b' is not among the tensors"),
        (lambda: Layout(tensors={"a": "width"}, blocks="h"), "blocks is 'h'; use one"),
        (lambda: Layout(tensors={"a": "width"}).of("b"), "tensor 'b': no line of the layout fits"),
        (
            lambda: Layout(tensors={"a.*": "x", "a.1": "x"}).of("a.1"),
            r"'a.\*', 'a.1' of the layout",
        ),
        (lambda: Layout(tensors={"a": "x"}).of("a", 2), "'a' has 2 axes, but .* describes 1: 'x'"),
    ],
)
def test_fails_where_layout_and_tensors_do_not_fit(layout: object, said: str) -> None:
    assert callable(layout)
    with pytest.raises(ValueError, match=said):
        layout()


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        (
            {"wdith": 2},
            "no tensor has the dimension 'wdith'; the layout knows experts, heads, hidden",
        ),
        ({"width": 1.5}, "factor 1.5 of 'width': use a whole number from 1"),
        ({"width": 0}, "factor 0 of 'width'"),
    ],
)
def test_fails_for_factors_that_mean_nothing(factors: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        widen({}, Kind().layout, factors)


def test_fails_before_anything_is_changed_if_the_model_is_another() -> None:
    kind = Kind()
    model = kind.model([DENSE])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for state, said in [
        (kind.model([SPARSE]).state_dict(), r"lacks 'blocks.0.ffn.down.bias' and 3 more; it has"),
        (
            widen(before, kind.layout, times(2)),
            r"grown to \(29, 24\), but the model expects \(29, 12\)",
        ),
    ]:
        with pytest.raises(ValueError, match=said):
            fill(model, state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_fails_where_nothing_can_grow() -> None:
    layout, state = Kind().layout, Kind().model([SPARSE]).state_dict()
    with pytest.raises(ValueError, match="nothing becomes experts: no tensor is one of"):
        upcycle(state, layout, num_experts=4, fresh=state)
    with pytest.raises(ValueError, match="num_experts is 1; use at least 2"):
        upcycle(state, layout, num_experts=1, fresh=state)
    with pytest.raises(ValueError, match="a block after block 3: there are blocks 0 to 0"):
        deepen(state, layout, after=[3])
    with pytest.raises(ValueError, match="fresh has no tensors of block 1"):
        deepen(state, layout, after=[0], fresh=state)
    plain = Layout(tensors={"h.*.w": "width <- width"}, blocks="h.*")
    with pytest.raises(ValueError, match="none of its 1 tensors adds to the residual stream"):
        deepen({"h.0.w": torch.ones(2, 2)}, plain, after=[0])
    with pytest.raises(ValueError, match=r"numbered \[1\], not from 0 on"):
        deepen({"h.1.w": torch.ones(2, 2)}, plain, after=[0])


def test_fails_where_two_dense_tensors_become_one_that_is_not_packed() -> None:
    layout = Layout(
        tensors={"h.*.up": "hidden <- width", "h.*.gate": "hidden <- width", "h.*.both": "a b c"},
        blocks="h.*",
        experts={"h.*.gate": "h.*.both", "h.*.up": "h.*.both"},
    )
    state = {"h.0.up": torch.ones(2, 2), "h.0.gate": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"become 'h.0.both', but the layout marks none of its"):
        upcycle(state, layout, num_experts=2, fresh={})


def test_fails_for_the_state_of_another_optimizer() -> None:
    state = {"embedding.weight": {"momentum_buffer": torch.ones(2, 2)}}
    said = "has 'momentum_buffer': how it grows is known for Adam's"
    with pytest.raises(ValueError, match=said):
        widen_optimizer(state, Kind().layout, times(2))
    with pytest.raises(ValueError, match=said):
        upcycle_optimizer(state, Kind().layout, num_experts=4, top_k=2)


def test_single_numbers_and_whole_ones_stay_as_they_are() -> None:
    layout = Layout(tensors={"scale": "", "counts": "width"})
    state = {"scale": torch.tensor(2.5), "counts": torch.tensor([2**53 + 1])}
    grown = widen(state, layout, {"width": 2})
    assert torch.equal(grown["scale"], state["scale"])
    assert grown["counts"].tolist() == [2**53 + 1] * 2


def test_new_blocks_are_spread_evenly() -> None:
    assert evenly_after(7, 4) == (1, 3, 5, 6)
    assert evenly_after(4, 4) == (0, 1, 2, 3)
    assert evenly_after(2, 3) == (0, 1, 1)


def test_only_some_blocks_may_become_experts_and_each_a_tensor_of_its_own() -> None:
    layout = Layout(
        tensors={
            "h.*.fc.weight": "hidden <- width",
            "h.*.experts.*.fc.weight": "hidden <- width",
            "h.*.gate.weight": "experts <- width",
        },
        blocks="h.*",
        experts={"h.*.fc.weight": "h.*.experts.*.fc.weight"},
        routers=["h.*.gate.weight"],
    )
    state = {f"h.{block}.fc.weight": torch.full((3, 2), float(block)) for block in range(2)}
    router = nn.Linear(2, 2, bias=False).weight.detach()
    fresh = {f"h.{block}.gate.weight": router for block in range(2)}
    grown = dict(upcycle(state, layout, num_experts=2, fresh=fresh, blocks=[1]))
    assert sorted(grown) == [
        "h.0.fc.weight",
        "h.1.experts.0.fc.weight",
        "h.1.experts.1.fc.weight",
        "h.1.gate.weight",
    ]
    assert torch.equal(grown["h.1.experts.1.fc.weight"], state["h.1.fc.weight"])
