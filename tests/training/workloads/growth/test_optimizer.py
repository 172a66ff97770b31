"""AdamW with moments in bfloat16: close to AdamW, half its state, and exact over a resume."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tests.training.workloads.growth.models import small_model, texts
from training.engine.optimizer import step_in_backward
from training.workloads.growth import optimizer as module
from training.workloads.growth.growth_workload import _has_weight_decay
from training.workloads.growth.optimizer import BFloat16AdamW

BETAS = (0.9, 0.95)


def test_it_follows_adamw_up_to_the_rounding_of_its_moments() -> None:
    ours, theirs = (train(kind, steps=20) for kind in (BFloat16AdamW, AdamW))
    start = parameters_of(small_model())
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    assert not torch.equal(ours, theirs)


def test_the_first_step_is_adamws_own() -> None:
    # From moments of zero nothing has been rounded yet.
    assert torch.equal(train(BFloat16AdamW, steps=1), train(AdamW, steps=1))


@pytest.mark.parametrize("fused", [False, True])
def test_slices_of_a_parameter_make_no_difference(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    whole = train(BFloat16AdamW, steps=3, fused=fused)
    monkeypatch.setattr(module, "_SLICE", 7)
    torch.testing.assert_close(
        train(BFloat16AdamW, steps=3, fused=fused), whole, rtol=1e-6, atol=1e-7
    )


def test_the_state_is_half_of_adamws() -> None:
    model, optimizer = scene(BFloat16AdamW)
    step(model, optimizer, 1)
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    assert sum(m.nbytes for m in moments) == sum(p.nbytes for p in model.parameters())


def test_in_backward_it_makes_the_same_steps_without_keeping_gradients() -> None:
    model, optimizer = scene(BFloat16AdamW)
    step_in_backward(optimizer)
    tokens, targets = texts()
    for _ in range(3):
        loss = model.loss(tokens, targets)
        (loss.total / 33 + loss.balance).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(parameters_of(model), train(BFloat16AdamW, steps=3))


def test_a_second_moment_fades_where_gradients_end() -> None:
    """By 0.99 a step, in steps of bfloat16: what 0.999 would not, which is refused."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = BFloat16AdamW([weight], betas=(0.9, 0.99))
    for gradient in (1.0, *[0.0] * 200):
        weight.grad = torch.full((1,), gradient)
        optimizer.step()
    assert 0.0 < optimizer.state[weight]["exp_avg_sq"].item() < 0.01 * 0.5
    with pytest.raises(
        ValueError, match=r"betas\[1\] is 0.999: .* use at most 0.992, such as 0.95"
    ):
        BFloat16AdamW([weight], betas=(0.9, 0.999))


def test_biases_and_norms_do_not_decay() -> None:
    names = [n for n, p in small_model().named_parameters() if not _has_weight_decay(n, p)]
    assert "blocks.1.ffn.experts.up_bias" in names and "final_norm.weight" in names
    assert all("bias" in name or "norm" in name for name in names)


def scene(kind: type[Optimizer], **more: Any) -> tuple[Any, Optimizer]:
    model = small_model().float()
    arguments = {"lr": 1e-3, "betas": BETAS, "weight_decay": 0.1, **more}
    return model, kind(model.parameters(), **arguments)  # type: ignore[arg-type]


def step(model: Any, optimizer: Optimizer, steps: int) -> None:
    tokens, targets = texts()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(tokens, targets)
        (loss.total / 33 + loss.balance).backward()
        optimizer.step()


def train(kind: type[Optimizer], *, steps: int, **more: Any) -> Tensor:
    model, optimizer = scene(kind, **more)
    step(model, optimizer, steps)
    return parameters_of(model)


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])
