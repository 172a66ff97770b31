"""A learning rate may be a tensor, as optimizers that are compiled or captured want it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from tests.training.hooks import interrupt_at
from tests.training.runs import Run, assert_equal
from tests.training.tiny import TinyTrain


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
