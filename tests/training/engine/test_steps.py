"""A stage of steps: it ends in mid-epoch, resumes there, and is extended to the step."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contract.samples import lineage_problems
from tests.training import hooks, tiny
from tests.training.runs import Run, assert_equal
from training.workload import Batch, Loss

# An epoch has four steps: the first stage has one, the second ends in the middle of its second.
STEPS = ["--override=epochs=1", "--override=evaluate_every_steps=4"]
SIX, CONSTANT = "--override=second_steps=6", "--override=schedule=constant"


def new_run(dataset: Path, folder: Path, *options: str) -> Run:
    return Run(dataset=dataset, uri=str(folder / "run"), scratch=folder, options=[*options])


# Of the uninterrupted run: what `loss` and `get` were told.
LOSSES: list[tuple[str, int, int]] = []
GOTTEN: list[int] = []


class SeeingRows(tiny.Rows):
    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        GOTTEN.append(epoch)
        return super().get(index, epoch, rng)


@pytest.fixture(scope="module")
def steady(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    loss = tiny.TinyTrain.loss

    def seeing(stage: tiny.TinyTrain, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        LOSSES.append((stage.name, step, num_steps))
        return loss(stage, m, b, step, num_steps)

    run = new_run(dataset, tmp_path_factory.mktemp("steady"), *STEPS, SIX, CONSTANT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.TinyTrain, "loss", seeing)
        patch.setattr(tiny, "Rows", SeeingRows)
        assert run.attempt() == 0
    return run


def test_a_stage_knows_how_far_it_is(steady: Run) -> None:
    """`loss` its step and their number, for each micro-batch; `get` its epoch: -1 if evaluated."""
    seen = dict.fromkeys(LOSSES)
    expected = [("first", step, 4) for step in range(4)]
    assert list(seen) == expected + [("second", step, 6) for step in range(6)]
    assert Counter(GOTTEN) == {0: 30 + 30, 1: 16, -1: 3 * 12}


def test_a_stage_of_steps_ends_and_is_evaluated_in_mid_epoch(steady: Run) -> None:
    steps = steady.lineage()
    assert [steps[step]["stage"] for step in range(1, 11)] == ["first"] * 4 + ["second"] * 6
    assert [steps[step]["epoch"] for step in range(5, 11)] == [0, 0, 0, 0, 1, 1]
    evaluations = [(line["stage"], line["step"]) for line in steady.lines("evaluation")]
    assert evaluations == [("first", 4), ("second", 8), ("second", 10)]
    assert [steps[step]["num_samples"] for step in range(5, 11)] == [8, 8, 8, 6, 8, 8]
    assert lineage_problems(steps) == []


def test_an_interrupted_stage_of_steps_equals_the_uninterrupted_one(
    steady: Run, dataset: Path, tmp_path: Path
) -> None:
    run = new_run(dataset, tmp_path, *steady.options)
    for place, number in (("second-evaluation", 5), ("second", 4), ("second", 5)):
        tiny.HOOKS[place] = lambda reached, at=number: (  # type: ignore[misc]
            hooks.notice() if reached == at else None
        )
        assert run.attempt() == 75
        tiny.HOOKS.clear()
    assert run.attempt() == 0
    assert_equal(run, steady)


@pytest.mark.parametrize(
    ("length", "longer"), [("9steps", "second_steps=9"), ("2epochs", "second_epochs=2")]
)
def test_an_extended_stage_of_steps_equals_a_longer_one(
    steady: Run, dataset: Path, tmp_path: Path, length: str, longer: str
) -> None:
    extend = [f"--init-from={steady.uri}", f"--extend-to={length}"]
    ours = new_run(dataset, tmp_path / "ours", *steady.options, *extend)
    assert ours.attempt() == 0
    other = new_run(dataset, tmp_path / "other", *STEPS, CONSTANT, f"--override={longer}")
    assert other.attempt() == 0
    assert ours.head.weights_sha256 == other.head.weights_sha256
    assert ours.losses() == other.losses()[10:]


def test_fails_to_extend_a_stage_of_steps_by_nothing(
    steady: Run, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for length in ("6steps", "1epochs"):
        extend = [f"--init-from={steady.uri}", f"--extend-to={length}"]
        assert new_run(dataset, tmp_path, *steady.options, *extend).attempt() == 2
        said = capsys.readouterr().err
        assert "has already trained stage 'second' for 6 steps, 1 whole epochs; pass more" in said
