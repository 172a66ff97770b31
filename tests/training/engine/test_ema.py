"""The moving average: of buffers too, every so many steps, and the same after an interruption."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from contract.errors import UserError
from tests.training import hooks, tiny
from tests.training.runs import Run, assert_equal
from training.durable.save.tensors.resume import CheckpointContent
from training.engine.optimizer import MovingAverage
from training.workload import Batch, Partial

AVERAGED = [
    f"--override={pair}"
    for pair in ("ema_decay=0.9", "ema_every_steps=3", "ema_buffers=true", "epochs=1")
]


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def test_the_average_is_of_what_is_saved_and_has_fractions() -> None:
    model = Buffered()
    parameters = {"norm.weight", "norm.bias"}
    assert MovingAverage(model, 0.5).tensors.keys() == parameters
    average = MovingAverage(model, 0.5, with_buffers=True)
    statistics = {"norm.running_mean", "norm.running_var"}
    assert average.tensors.keys() == parameters | statistics
    model.norm.running_mean.fill_(4.0)  # type: ignore[union-attr]
    average.update()
    assert average.tensors["norm.running_mean"].tolist() == [2.0, 2.0]
    with average.swapped_in():
        assert model.state_dict()["norm.running_mean"].tolist() == [2.0, 2.0]
        assert average.tensors["norm.running_mean"].tolist() == [4.0, 4.0]
    assert model.state_dict()["norm.running_mean"].tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "value", [torch.tensor([-torch.inf, 0.0]), torch.arange(4, dtype=torch.uint8)]
)
def test_what_is_not_trained_is_as_in_the_model(value: torch.Tensor) -> None:
    """An average of infinities would be NaN, and one of integers has no fractions."""
    model = nn.Linear(2, 2, bias=False)
    model.register_parameter("table", nn.Parameter(value, requires_grad=False))
    model.register_buffer("mask", torch.tensor([-torch.inf, 1.0]))
    average = MovingAverage(model, 0.5, with_buffers=True)
    with torch.no_grad():
        model.weight.fill_(0.0)
    average.update()
    with average.swapped_in():
        assert torch.equal(model.state_dict()["table"], value)
        assert model.state_dict()["mask"].tolist() == [-torch.inf, 1.0]
        assert model.weight.any()


def test_fails_for_an_average_that_would_never_move() -> None:
    model = nn.Linear(2, 2).bfloat16()
    MovingAverage(model.requires_grad_(False), 0.999)
    with pytest.raises(UserError, match=r"ema_decay is 0\.999, but weight is torch\.bfloat16"):
        MovingAverage(model.requires_grad_(True), 0.999)


def interrupted(run: Run, *ranks: int) -> None:
    """One attempt that a notice ends in the second stage, and one that finishes."""
    tiny.HOOKS["second"] = lambda step: hooks.notice() if step == 2 else None
    assert (run.attempt_with_ranks(*ranks)[0] if ranks else run.attempt()) == 75
    tiny.HOOKS.clear()
    assert (run.attempt_with_ranks(*ranks)[0] if ranks else run.attempt()) == 0


def test_it_is_updated_every_so_many_steps_and_resumes_bit_for_bit(
    run: Run, finished: Callable[..., Run]
) -> None:
    run.options = [*AVERAGED]
    interrupted(run)
    whole = finished(*AVERAGED, "--checkpoint-interval=1steps", "--keep=50")
    assert_equal(run, whole)
    averages = {
        entry.step: CheckpointContent.read(whole.store, entry).tensors["ema"]["1.running_mean"]
        for entry in whole.head.checkpoints
        if entry.stage == "first"
    }
    changed = [s for s in (2, 3, 4) if not torch.equal(averages[s], averages[s - 1])]
    assert changed == [3]


def test_every_rank_evaluates_with_the_same_averages(
    run: Run, finished: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's own would differ, and be rank 0's after a resume."""

    def evaluate(stage: tiny.TinyTrain, m: nn.Module, b: Batch) -> Partial:
        return Partial(sums={"accuracy": (m(b["x"]).sum().item(), 1.0)})

    monkeypatch.setattr(tiny.TinyTrain, "evaluate", evaluate)
    run.options = [*AVERAGED, "--override=micro_batch=4"]
    whole = finished(*run.options, ranks=2)
    interrupted(run, 2)
    assert_equal(run, whole)
    evaluated = [[line["metrics"] for line in each.lines("evaluation")] for each in (run, whole)]
    assert evaluated[0] == evaluated[1]


@pytest.mark.parametrize(
    ("decay", "says"), [("0.9", "[first] the average ends with 43% "), ("0.1", "")]
)
def test_a_run_warns_of_an_average_that_remembers_the_weights_before_it(
    run: Run, caplog: pytest.LogCaptureFixture, decay: str, says: str
) -> None:
    """Detection's full recipe on 300 images ends with 22 % of random weights."""
    run.options = [f"--override=ema_decay={decay}", "--override=epochs=2"]
    assert run.attempt() == 0
    warned = [each.message for each in caplog.records if "the average ends" in each.message]
    assert [each.startswith(says) for each in warned[:1]] == [True] * bool(says)
