"""The checkpoint with the best metric stays, whatever the metric does."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.training.runs import Run
from tests.training.tiny import Rows, TinyTrain
from training.workload import Inputs, Partial

OPTIONS = [
    "--override=best_metric=accuracy",
    "--override=epochs=6",
    "--override=second_epochs=1",
    "--keep=1",
    "--checkpoint-interval=1000steps",
]


def best_of(run: Run, monkeypatch: pytest.MonkeyPatch, *values: float) -> dict[str, int]:
    """The step of each stage's best checkpoint, where a stage's evaluations give these values."""
    left: dict[str, Iterator[float]] = {}

    def summarize(self: TinyTrain, parts: Sequence[Partial], out: Path) -> dict[str, float]:
        return {"accuracy": next(left.setdefault(self.name, iter(values)))}

    monkeypatch.setattr(TinyTrain, "summarize", summarize)
    run.options = OPTIONS
    assert run.attempt() == 0
    return {entry.stage: entry.step for entry in run.head.checkpoints if entry.is_best}


def test_a_metric_that_is_not_finite_is_never_best(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    best = best_of(run, monkeypatch, 0.5, 0.9, math.nan, 0.3, math.inf, 0.2)
    assert best == {"first": 8, "second": 28}, "the epoch with 0.9; the only one"
    said = capfd.readouterr().out
    assert "[first] after epoch 3: accuracy is nan, which never counts as best" in said
    assert "[first] after epoch 5: accuracy is inf, which never counts as best" in said


def test_the_first_metric_may_be_no_number(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    best = best_of(run, monkeypatch, math.nan, 0.1, 0.3, 0.2, 0.0, 0.0)
    assert best == {"first": 12}, "the second stage has but the one that is not a number"


@pytest.mark.parametrize("every", [0, 1])
def test_only_a_stage_that_needs_validation_samples_fails_without(
    every: int, run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    samples = TinyTrain.samples

    def none(self: TinyTrain, i: Inputs, split: str) -> Rows:
        rows = samples(self, i, split)
        return rows if split == "train" else Rows(rows._x[:0])

    monkeypatch.setattr(TinyTrain, "samples", none)
    run.options = ["--override=epochs=1", f"--override=evaluate_every_epochs={every}"]
    assert (run.attempt() == 0) is (every == 0)
    said = "".join(capfd.readouterr())
    if every:
        assert "stage 'first' has no validation samples; add some" in said
    else:
        assert "nothing to evaluate: split 'validation' has no samples" in said
        assert all(line["metrics"] == {} for line in run.lines("evaluation"))
