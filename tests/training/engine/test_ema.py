"""The moving average: of buffers too, every so many steps, and the same after an interruption."""

from pathlib import Path

import pytest
import torch
from torch import nn

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


def interrupted(run: Run, *ranks: int) -> None:
    """One attempt that a notice ends in the second stage, and one that finishes."""
    tiny.HOOKS["second"] = lambda step: hooks.notice() if step == 2 else None
    assert (run.attempt_with_ranks(*ranks)[0] if ranks else run.attempt()) == 75
    tiny.HOOKS.clear()
    assert (run.attempt_with_ranks(*ranks)[0] if ranks else run.attempt()) == 0


def test_it_is_updated_every_so_many_steps_and_resumes_bit_for_bit(
    dataset: Path, tmp_path: Path
) -> None:
    runs = [
        Run(dataset=dataset, uri=str(tmp_path / name), scratch=tmp_path, options=[*AVERAGED])
        for name in ("whole", "ours")
    ]
    runs[0].options += ["--checkpoint-interval=1steps", "--keep=50"]
    assert runs[0].attempt() == 0
    interrupted(runs[1])
    assert_equal(runs[1], runs[0])
    averages = {
        entry.step: CheckpointContent.read(runs[0].store, entry).tensors["ema"]["1.running_mean"]
        for entry in runs[0].head.checkpoints
        if entry.stage == "first"
    }
    changed = [s for s in (2, 3, 4) if not torch.equal(averages[s], averages[s - 1])]
    assert changed == [3]


def test_every_rank_evaluates_with_the_same_averages(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's own would differ, and be rank 0's after a resume."""

    def evaluate(stage: tiny.TinyTrain, m: nn.Module, b: Batch) -> Partial:
        return Partial(sums={"accuracy": (m(b["x"]).sum().item(), 1.0)})

    monkeypatch.setattr(tiny.TinyTrain, "evaluate", evaluate)
    options = [*AVERAGED, "--override=micro_batch=4"]
    runs = [
        Run(dataset=dataset, uri=str(tmp_path / name), scratch=tmp_path, options=options)
        for name in ("whole", "ours")
    ]
    assert runs[0].attempt_with_ranks(2) == [0, 0]
    interrupted(runs[1], 2)
    assert_equal(runs[1], runs[0])
    whole, ours = (run.lines("evaluation") for run in runs)
    assert [line["metrics"] for line in ours] == [line["metrics"] for line in whole]
