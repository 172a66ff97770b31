"""Copies that start their moments anew part from their twins; interrupted, they go on as before."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.training.workloads.expansion.models import SPARSE, Kind, adamw, times, train
from training.engine.optimizer import (
    step_in_backward,
)
from training.workloads.expansion import (
    Layout,
    RewarmingAdamW,
    fill,
    optimizer_state_by_name,
    set_optimizer_state,
    widen,
    widen_optimizer,
)
from training.workloads.growth.model import LanguageModel

KIND, FACTOR = Kind(), 2
NAME = "blocks.0.attention.query.weight"


def grown(rewarm_steps: int | None, noise: float = 0.0) -> tuple[LanguageModel, RewarmingAdamW]:
    """A model of twice the width after ten steps of the small one, and its optimizer."""
    small, large = KIND.model([SPARSE]), KIND.model([SPARSE], FACTOR)
    first = adamw(small, KIND.layout, {})
    train(small, first, range(10))
    fill(large, widen(small.state_dict(), KIND.layout, times(FACTOR), split_noise=noise))
    state = optimizer_state_by_name(first, small)
    carried = widen_optimizer(state, KIND.layout, times(FACTOR), rewarm_steps=rewarm_steps)
    then = adamw(large, KIND.layout, times(FACTOR), RewarmingAdamW)
    assert isinstance(then, RewarmingAdamW)
    set_optimizer_state(then, large, carried)
    return large, then


def twins_apart(model: LanguageModel) -> float:
    """The relative distance of the heads and their copies."""
    old, new = model.state_dict()[NAME].chunk(2)
    return ((old - new).norm() / old.norm()).item()


def test_twins_part_if_their_state_does_not_stay_equal() -> None:
    apart = {}
    for kind, steps, noise in [("exact", None, 0.0), ("reset", 5, 0.0), ("noise", None, 0.1)]:
        model, optimizer = grown(steps, noise)
        train(model, optimizer, range(10, 30))
        apart[kind] = twins_apart(model)
    print(", ".join(f"{kind}: {value:.1e}" for kind, value in apart.items()))
    assert apart["exact"] < 1e-12
    assert apart["reset"] > 1e-2
    assert apart["noise"] > 1e-2


def alone(rewarm_steps: int | None) -> tuple[nn.Linear, RewarmingAdamW]:
    """One matrix of 3 rows, grown to 6 after four steps, and its optimizer."""
    layout = Layout(tensors={"weight": "hidden <- width"})
    state = {"weight": {"step": torch.tensor(4.0), **moments()}}
    matrix = nn.Linear(2, 6, bias=False, dtype=torch.float64)
    optimizer = RewarmingAdamW(matrix.parameters(), lr=0.1, eps=1e-30, weight_decay=0.0)
    grown = widen_optimizer(state, layout, {"hidden": 2}, rewarm_steps=rewarm_steps)
    set_optimizer_state(optimizer, matrix, grown)
    return matrix, optimizer


def moments() -> dict[str, Tensor]:
    values = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)
    return {"exp_avg": values, "exp_avg_sq": values**2}


def gradient(step: int) -> Tensor:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(6, 2, generator=rng, dtype=torch.float64)


def test_a_new_copy_takes_adamws_own_first_steps_at_a_rising_rate() -> None:
    matrix, optimizer = alone(rewarm_steps=4)
    old = nn.Parameter(matrix.weight[:3].detach().clone())
    new = nn.Parameter(matrix.weight[3:].detach().clone())
    carried = AdamW([old], lr=0.1, eps=1e-30, weight_decay=0.0)
    halves = {key: value / 2 ** (1 + (key == "exp_avg_sq")) for key, value in moments().items()}
    carried.state[old] = {"step": torch.tensor(4.0), **halves}
    fresh = AdamW([new], lr=0.1, eps=1e-30, weight_decay=0.0)
    for step in range(8):
        matrix.weight.grad, old.grad, new.grad = (gradient(step), *gradient(step).chunk(2))
        fresh.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 4)
        for one in (optimizer, carried, fresh):
            one.step()
        assert torch.equal(matrix.weight[:3], old)
        assert (matrix.weight[3:] - new).abs().max() < 1e-12


def test_when_its_moments_have_settled_it_is_plain_adamw() -> None:
    matrix, optimizer = alone(rewarm_steps=4)
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    num_steps = 0
    while "rewarm" in optimizer.state[matrix.weight]:
        matrix.weight.grad = gradient(num_steps)
        optimizer.step()
        num_steps += 1
    assert num_steps == 10  # 0.5 ** 10 is the first below a thousandth
    plain = nn.Parameter(matrix.weight.detach().clone())
    other = AdamW([plain], lr=0.1, eps=1e-30, weight_decay=0.0, betas=(0.5, 0.5))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain.grad = matrix.weight.grad = gradient(99)
    optimizer.step(), other.step()
    assert torch.equal(plain, matrix.weight)


def test_in_backward_it_takes_the_same_steps() -> None:
    model, optimizer = grown(rewarm_steps=8)
    other, in_backward = grown(rewarm_steps=8)
    step_in_backward(in_backward)
    steps = range(10, 13)
    assert train(model, optimizer, steps) == train(other, in_backward, steps)
    assert twins_apart(model) == twins_apart(other)


def test_of_packed_parts_each_has_its_own_new_copies() -> None:
    layout = Layout(tensors={"qkv": "width -> (3 heads)"})
    ones = torch.ones(2, 6)
    state = {"qkv": {"step": 1, "exp_avg": ones, "exp_avg_sq": ones}}
    own = widen_optimizer(state, layout, {"heads": 2}, rewarm_steps=5)["qkv"]
    assert own["exp_avg"][0].tolist() == [0.5, 0.5, 0, 0] * 3
    assert own["exp_avg_sq"][1].tolist() == [0.25, 0.25, 0, 0] * 3


def test_where_only_what_is_read_is_copied_those_columns_start_anew() -> None:
    router = Layout(tensors={"router": "experts <- width"})
    ones = torch.ones(2, 2)
    state = {"router": {"step": 1, "exp_avg": ones, "exp_avg_sq": ones}}
    own = widen_optimizer(state, router, {"width": 2}, rewarm_steps=5)["router"]
    assert own["exp_avg"].tolist() == [[1, 1, 0, 0]] * 2


@pytest.mark.parametrize(("steps", "said"), [(0, "rewarm_steps is 0"), (-2, "rewarm_steps is -2")])
def test_fails_without_steps_to_warm(steps: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        widen_optimizer({}, KIND.layout, times(2), rewarm_steps=steps)
