"""The learning rate: its factor at every step, a warmup with each schedule, and as a tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from contract.errors import UserError
from tests.training.hooks import interrupt_at
from tests.training.runs import Run, assert_equal
from tests.training.tiny import TinyTrain
from training.settings import Milestones, Settings, schedule_factor


def factors(schedule: Any, **changes: Any) -> list[float]:
    """Of 20 steps in epochs of five."""
    settings = Settings(steps=20, global_batch=1, micro_batch=1, schedule=schedule, **changes)
    return [schedule_factor(settings, step, 20, 5) for step in range(20)]


def test_the_cosine_goes_up_and_down() -> None:
    found = factors("cosine", warmup_steps=4, final_lr_fraction=0.1)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[-1] == pytest.approx(0.1)


def test_the_line_falls_by_the_same_at_every_step() -> None:
    found = factors("linear", warmup_steps=4, final_lr_fraction=0.25)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[4:] == pytest.approx([1 - 0.05 * k for k in range(16)])


@pytest.mark.parametrize("milestones", [{"epochs": (2, 3)}, {"steps": (10, 15)}])
def test_milestones_are_at_steps_or_at_the_beginnings_of_epochs(milestones: Any) -> None:
    found = factors(Milestones(factor=0.1, **milestones), warmup_steps=2)
    assert found == pytest.approx([0.5, 1.0] + [1.0] * 8 + [0.1] * 5 + [0.01] * 5)


def test_a_function_of_the_step_is_multiplied_by_the_warmup() -> None:
    found = factors(lambda step, num_steps: 1 - step / num_steps, warmup_steps=2)
    assert found == pytest.approx([0.5, 0.95, *(1 - k / 20 for k in range(2, 20))])


@pytest.mark.parametrize("wrong", [None, -0.1, float("nan"), float("inf")])
def test_fails_for_a_function_that_gives_no_factor(wrong: Any) -> None:
    with pytest.raises(UserError, match=f"the schedule returned {wrong} for step 0 of 20; return"):
        factors(lambda step, num_steps: wrong)


def test_a_tensor_as_learning_rate_is_scheduled_saved_and_resumed(
    run: Run, new_run: Callable[[str], Run], whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[torch.Tensor] = []

    def optimizer(self: TinyTrain, m: nn.Module) -> Optimizer:
        rates.append(torch.tensor(self.config.learning_rate))
        return AdamW(m.parameters(), lr=rates[-1])

    monkeypatch.setattr(TinyTrain, "optimizer", optimizer)
    plain = new_run(f"{run.uri}-plain")
    assert plain.attempt() == 0
    first = whole.lines("step")[:12]
    for name in ("lr", "loss"):
        ours = [line[name] for line in plain.lines("step")[:12]]
        assert ours == pytest.approx([line[name] for line in first], rel=1e-3)
    assert float(rates[0]) == 0.0, "the schedule changes the tensor itself, which others may hold"
    interrupt_at("first", 7)
    assert run.attempt() == 75
    assert run.attempt() == 0
    assert_equal(run, plain)
