"""The optimizer in backward gives the same bits with fewer gradients, resumed or not."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.training import hooks
from tests.training.runs import Run, assert_equal
from training.engine.optimizer import step_in_backward

IN_BACKWARD = "--override=optimizer_in_backward=true"
# What goes with it: no accumulation, no clipping.
PLAIN = ["--override=micro_batch=8", "--override=clip_norm=none", "--override=epochs=1"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))


def trained(make: Callable[[list[Any]], Optimizer], *, in_backward: bool) -> list[Tensor]:
    own = model()
    own[2].bias.requires_grad_(False)
    groups = [{"params": list(own[0].parameters())}, {"params": list(own[2:].parameters())}]
    optimizer = make(groups)
    if in_backward:
        step_in_backward(optimizer)
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        own(torch.ones(3, 4)).square().sum().backward()
        if in_backward:
            assert all(parameter.grad is None for parameter in own.parameters())
        else:
            optimizer.step()
            optimizer.zero_grad()
        # As after a checkpoint was loaded.
        optimizer.load_state_dict(optimizer.state_dict())
    return [tensor.detach() for tensor in own.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: AdamW(groups, lr=1.0),
        lambda groups: AdamW(groups, lr=1.0, foreach=True),
        lambda groups: SGD(groups, lr=1.0, momentum=0.9, nesterov=True),
    ],
)
def test_any_optimizer_steps_the_same(make: Callable[[list[Any]], Optimizer]) -> None:
    ours, plain = trained(make, in_backward=True), trained(make, in_backward=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_model_whose_stage_has_ended_is_freed() -> None:
    own = model()
    optimizer = SGD(own.parameters(), lr=0.1)
    step_in_backward(optimizer)
    freed = [weakref.ref(own[0].weight), weakref.ref(optimizer)]
    del own, optimizer
    gc.collect()
    assert [ref() for ref in freed] == [None, None]


def test_a_run_has_the_same_bits_interrupted_or_not_as_one_that_steps_after_backward(
    run: Run, finished: Callable[..., Run]
) -> None:
    run.options = [*PLAIN, IN_BACKWARD]
    hooks.interrupt_at("second", 1)
    assert run.attempt() == 75
    assert run.attempt() == 0
    assert_equal(run, finished(*PLAIN))


def test_fails_on_several_ranks_before_a_stage_is_trained(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.options = [*PLAIN, IN_BACKWARD, "--override=batch_norm=false"]
    assert run.attempt("--num-processes=2") == 2
    assert "has optimizer_in_backward: 2 processes would each" in capsys.readouterr().err
    assert not Path(run.uri, "head.json").exists()
