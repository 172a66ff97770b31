"""Every way to compute experts gives the same; none drops a token or leaves out a parameter."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.training.forked import in_fork
from tests.training.workloads.growth.models import small_config
from training.workloads.growth import experts
from training.workloads.growth.config import Activation, ExpertBlock, GrowthConfig, full
from training.workloads.growth.experts import ExpertFeedForward, ExpertProducts, choose_products
from training.workloads.growth.model import LanguageModel

WIDTH, NUM_TOKENS = 16, 7
# Added to the router's logits: tokens as they come; none for experts 4 to 7; all to 0 and 1.
ROUTINGS = {
    "mixed": [0.0] * 8,
    "four without": [0.0] * 4 + [-99.0] * 4,
    "two": [99.0, 50.0] + [0.0] * 6,
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    ("products", "dtype", "tolerance"),
    [
        ("split", torch.float64, 1e-12),
        ("bmm", torch.float64, 1e-12),
        ("grouped_mm", torch.float32, 2e-5),  # it knows no float64
    ],
)
def test_experts_compute_what_a_loop_over_them_does(
    products: ExpertProducts,
    dtype: torch.dtype,
    tolerance: float,
    activation: Activation,
    routing: str,
) -> None:
    ffn, x_ND, dy_ND = scene(activation, ROUTINGS[routing], dtype)
    ffn.products = products
    inputs = [x_ND, *ffn.parameters()]
    y_ND, _ = ffn(x_ND)
    ours = [y_ND, *torch.autograd.grad(y_ND, inputs, dy_ND)]
    expected_ND = looped(ffn, x_ND)
    theirs = [expected_ND, *torch.autograd.grad(expected_ND, inputs, dy_ND)]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("products", ["split", "bmm", "grouped_mm"])
def test_autocast_computes_experts_in_half_precision(products: ExpertProducts) -> None:
    ffn, x_ND, dy_ND = scene("gelu", ROUTINGS["mixed"], torch.float32)
    ffn.products = products
    exact_ND = looped(ffn, x_ND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_ND, _ = ffn(x_ND)
    torch.testing.assert_close(y_ND, exact_ND, rtol=0.05, atol=0.05)
    assert not torch.equal(y_ND, exact_ND)
    found = torch.autograd.grad(y_ND, list(ffn.parameters()), dy_ND)
    assert {gradient.dtype for gradient in found} == {torch.float32}


@pytest.mark.parametrize("products", ["split", "bmm", "grouped_mm"])
def test_autocast_keeps_no_copy_of_the_experts_weights_for_backward(
    products: ExpertProducts,
) -> None:
    ffn, x_ND, _ = scene("gelu", ROUTINGS["mixed"], torch.float32)
    ffn.products = products
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),  # type: ignore[func-returns-value]
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        ffn(x_ND)
    weights = [p for p in ffn.experts.parameters() if p.ndim == 3]
    assert {p.untyped_storage().data_ptr() for p in weights} <= {
        t.untyped_storage().data_ptr() for t in kept
    }
    copies = [
        t.shape for t in kept if t.dtype == torch.bfloat16 and t.numel() >= weights[0].numel()
    ]
    assert not copies


def test_the_balance_is_one_where_tokens_are_shared_evenly_and_grows_where_they_are_not() -> None:
    ffn, x_ND, _ = scene("gelu", ROUTINGS["two"], torch.float64)
    balance, busiest = ffn(x_ND)[1].unbind()
    # Expert 0 has all probability and half of the eight shares; expert 1 has the other half.
    assert balance.item() == pytest.approx(4.0) and busiest.item() == pytest.approx(4.0)
    with torch.no_grad():
        ffn.router.weight.zero_()
        ffn.router.bias.zero_()
    # The probabilities are equal, whichever experts a tie goes to.
    assert ffn(x_ND)[1][0].item() == pytest.approx(1.0)


def test_without_data_shapes_alone_decide_the_work() -> None:
    def shape() -> tuple[int, ...]:
        with FakeTensorMode():
            tokens = torch.zeros(3, 11, dtype=torch.long)
            model = LanguageModel(small_config())
            model.compute_experts_by("balanced")
            loss = model.loss(tokens, tokens)
            (loss.total + loss.balance).backward()
            return tuple(model.get_parameter("blocks.1.ffn.experts.up_weight").grad.shape)  # type: ignore[union-attr]

    assert in_fork(shape) == (4, 24, 16)


def test_fails_for_a_way_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="expert_products is 'loop'; use one of auto, split, bmm"):
        GrowthConfig(expert_products="loop")  # type: ignore[arg-type]


def scene(
    activation: Activation, bias_E: Sequence[float], dtype: torch.dtype
) -> tuple[ExpertFeedForward, Tensor, Tensor]:
    """Experts with these biases of the router, tokens, and a gradient of what comes out."""
    torch.manual_seed(0)
    ffn = ExpertFeedForward(WIDTH, ExpertBlock(hidden=32), activation).to(dtype)
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.normal_(std=0.3)
        ffn.router.bias.add_(torch.tensor(bias_E))
    x_ND = torch.randn(NUM_TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return ffn, x_ND, torch.randn(NUM_TOKENS, WIDTH, dtype=dtype)


def looped(ffn: ExpertFeedForward, x_ND: Tensor) -> Tensor:
    """The definition: each expert, on the tokens that chose it."""
    experts = ffn.experts
    shares_NE = ffn.router(x_ND).softmax(dim=-1)
    shares_NK, chosen_NK = shares_NE.topk(ffn.top_k, dim=-1)
    shares_NK = shares_NK / shares_NK.sum(dim=-1, keepdim=True)
    y_ND = torch.zeros_like(x_ND)
    for number in range(shares_NE.shape[1]):

        def layer(x: Tensor, weight: Tensor, bias: Tensor, number: int = number) -> Tensor:
            return F.linear(x, weight[number], bias[number])

        tokens, place = (chosen_NK == number).nonzero(as_tuple=True)
        y = experts(layer, x_ND[tokens]) * shares_NK[tokens, place, None]
        y_ND = y_ND.index_add(0, tokens, y)
    return y_ND


def chosen(dtype: torch.dtype = torch.float32, started_with: str | None = None) -> ExpertProducts:
    return choose_products(
        small_config(), num_tokens=6, device=CPU, dtype=dtype, started_with=started_with
    )


@pytest.mark.parametrize("fastest", ["split", "bmm", "grouped_mm"])
def test_the_fastest_is_chosen_however_slow_its_slowest_round(
    monkeypatch: pytest.MonkeyPatch, fastest: ExpertProducts
) -> None:
    rounds = iter([9.0, 0.1, 0.1, 0.1, 0.1])

    def seconds(bench: object, products: ExpertProducts) -> float:
        return next(rounds) if products == fastest else 1.0

    monkeypatch.setattr(experts._Bench, "seconds", seconds)
    assert chosen() == fastest


def test_one_is_chosen_by_real_steps_in_any_precision() -> None:
    assert chosen(torch.bfloat16) in ("split", "bmm", "grouped_mm")


def test_what_this_machine_cannot_compute_is_no_choice() -> None:
    # grouped_mm knows no float64.
    assert {chosen(torch.float64, "grouped_mm"), chosen(torch.float64)} <= {"split", "bmm"}


@pytest.mark.parametrize("products", ["split", "bmm", "grouped_mm"])
def test_what_the_stage_started_with_is_kept(products: ExpertProducts) -> None:
    assert chosen(started_with=products) == products


def test_a_model_without_experts_is_not_timed() -> None:
    assert (
        choose_products(full().dense_model, num_tokens=4096, device=CPU, dtype=torch.float32)
        == "split"
    )
