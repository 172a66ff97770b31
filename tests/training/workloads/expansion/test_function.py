"""A grown model computes what the smaller one did: in float64 to 1e-12, new blocks bit for bit."""

import weakref
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.workloads.expansion.models import (
    DENSE,
    EXPERTS,
    KINDS,
    SPARSE,
    TOP_K,
    Kind,
    seen,
    times,
)
from training.workloads.expansion import (
    Layout,
    block_origins,
    deepen,
    evenly_after,
    fill,
    upcycle,
    verify,
    widen,
)
from training.workloads.expansion.verify import Verification
from training.workloads.growth.config import DenseBlock

NAMES = [f"{k.norm}-{k.activation}-{'tied' if k.is_tied else 'untied'}" for k in KINDS]


def assert_same(found: Verification) -> None:
    assert found.failures == ()
    assert found.logit_difference <= 1e-12
    assert found.max_logit > 0.5


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_upcycled_widened_with_noise_and_deepened_it_computes_the_same(kind: Kind) -> None:
    dense, small = kind.model([DENSE] * 2), kind.model([SPARSE] * 2)
    state = upcycle(dense.state_dict(), kind.layout, num_experts=EXPERTS, fresh=small.state_dict())
    fill(small, state)
    assert_same(verify(seen(dense), seen(small), top_k=TOP_K))
    for factor, noise in ((2, 0.0), (3, 0.5)):
        large = kind.model([SPARSE] * 2, factor, seed=1)
        wide = widen(small.state_dict(), kind.layout, times(factor), split_noise=noise, seed=5)
        fill(large, wide)
        found = verify(seen(small), seen(large), top_k=TOP_K)
        assert_same(found)
        assert (found.num_routings, found.num_rerouted_texts) == (2 * 16 * 8, 0)
    after = evenly_after(2, 3)
    origins = block_origins(2, after)
    assert origins == (0, None, 1, None, None)
    new = DenseBlock(hidden=7)
    deep = kind.model([new if own is None else SPARSE for own in origins], 3, seed=2)
    fill(deep, deepen(large.state_dict(), kind.layout, after=after, fresh=deep.state_dict()))
    found = verify(seen(large), seen(deep, origins), top_k=TOP_K)
    assert found.logit_difference == 0
    assert found.failures == ()


def test_new_blocks_may_be_of_their_neighbours_kind() -> None:
    kind = Kind()
    model = kind.model([SPARSE, DENSE])
    deep = kind.model([SPARSE, SPARSE, DENSE, DENSE], seed=1)
    fill(deep, deepen(model.state_dict(), kind.layout, after=[0, 1]))
    assert verify(seen(model), seen(deep, block_origins(2, [0, 1]))).logit_difference == 0
    # All of the block can learn: gradients reach the zeros, and the rest is no zero.
    grown = deep.state_dict()
    assert not grown["blocks.1.ffn.experts.down_weight"].any()
    router = "blocks.{}.ffn.router.weight"
    assert torch.equal(grown[router.format(1)], model.state_dict()[router.format(0)])


# A model whose dimensions are independent, written as GPT-2 writes its own: [in, out], q, k and v
# packed. B batch, T tokens, D width, H heads, d width of a head.
PACKED = Layout(
    tensors={
        "wte": "vocabulary width",
        "wpe": "positions width",
        "h.*.ln": "width",
        "h.*.qkv": "width -> (3 heads)",
        "h.*.qkv_bias": "(3 heads)",
        "h.*.out": "heads -> +width",
        "h.*.fc": "width -> hidden",
        "h.*.proj": "hidden -> +width",
        "ln_f": "width",
    },
    blocks="h.*",
    divided=["ln_f"],
)
HEAD_WIDTH = 3


def packed_state() -> dict[str, Tensor]:
    shapes = {
        "wte": (11, 8),
        "wpe": (5, 8),
        "h.0.ln": (8,),
        "h.0.qkv": (8, 3 * 6),
        "h.0.qkv_bias": (3 * 6,),
        "h.0.out": (6, 8),
        "h.0.fc": (8, 10),
        "h.0.proj": (10, 8),
        "ln_f": (8,),
    }
    rng = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=rng, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def packed_logits(state: Mapping[str, Tensor]) -> Tensor:
    x_BTD = state["wte"][torch.tensor([[1, 2, 3, 4, 10]])] + state["wpe"]

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) * gain

    qkv = norm(x_BTD, state["h.0.ln"]) @ state["h.0.qkv"] + state["h.0.qkv_bias"]
    q_BHTd, k_BHTd, v_BHTd = (
        part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)
    )
    y_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
    x_BTD = x_BTD + y_BHTd.transpose(1, 2).flatten(2) @ state["h.0.out"]
    x_BTD = x_BTD + F.gelu(x_BTD @ state["h.0.fc"]) @ state["h.0.proj"]
    return norm(x_BTD, state["ln_f"]) @ state["wte"].T


@settings(max_examples=20)
@given(
    factors=st.dictionaries(st.sampled_from(["width", "heads", "hidden"]), st.integers(1, 4)),
    noise=st.sampled_from([0.0, 1.0]),
)
def test_each_dimension_may_grow_by_any_factor(factors: dict[str, int], noise: float) -> None:
    small = packed_state()
    wide = widen(small, PACKED, factors, split_noise=noise)
    assert wide["h.0.qkv"].shape == (8 * factors.get("width", 1), 18 * factors.get("heads", 1))
    difference = packed_logits(wide) - packed_logits(small)
    assert difference.abs().max() <= 1e-12 * packed_logits(small).abs().max()


def test_the_noise_depends_on_seed_and_name_alone_and_sums_to_zero() -> None:
    kind = Kind()
    state = kind.model([DENSE]).state_dict()
    name = "blocks.0.ffn.up.weight"
    wide = widen(state, kind.layout, times(3), split_noise=0.5, seed=7)
    first = wide[name]
    torch.rand(3)
    again = widen({name: state[name]}, kind.layout, times(3), split_noise=0.5, seed=7)[name]
    other = widen(state, kind.layout, times(3), split_noise=0.5, seed=8)[name]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    rows, columns = state[name].shape
    apart = first.view(3, rows, 3, columns)
    assert (apart.sum(dim=2) - state[name]).abs().max() < 1e-15
    noise = apart - state[name][None, :, None] / 3
    assert noise.std().item() == pytest.approx(0.5 * state[name].std().item(), rel=0.05)
    # Each copy of a row has its own.
    assert (noise[0] - noise[1]).abs().mean() > 0.1 * noise.std()


class Counted(dict[str, Tensor]):
    """A state that remembers which of its tensors were read."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__(state)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return super().__getitem__(name)


def test_each_tensor_is_made_when_it_is_read_and_not_kept() -> None:
    kind = Kind()
    fresh = kind.model([SPARSE] * 2, 2).state_dict()
    state = Counted(kind.model([DENSE]).state_dict())
    sparse = upcycle(state, kind.layout, num_experts=EXPERTS, fresh=fresh)
    grown = deepen(widen(sparse, kind.layout, times(2), split_noise=0.1), kind.layout, after=[0])
    assert state.read == []
    name = "blocks.0.ffn.experts.up_weight"
    first, second = weakref.ref(grown[name]), grown[name]
    assert state.read == ["blocks.0.ffn.up.weight"] * 2
    assert first() is None
    assert second.shape == (EXPERTS, 40, 24)
