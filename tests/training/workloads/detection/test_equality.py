"""The detector under kills and notices ends as if nothing had been: weights, losses, samples."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.training import hooks, tiny
from tests.training.runs import Run, assert_equal
from tests.training.workloads.detection.watched import WORKLOAD, make_sparse_dataset


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_dataset(tmp_path_factory.mktemp("plans") / "data")


@pytest.fixture
def new(plans: Path, tmp_path: Path) -> Callable[..., Run]:
    def make(name: str, epochs: int, interval: str) -> Run:
        length = [f"--override=epochs={epochs}", f"--override=drop_epoch={epochs}"]
        options = [WORKLOAD, *length, f"--checkpoint-interval={interval}"]
        uri = tmp_path / name / "run"
        return Run(dataset=plans, uri=str(uri), scratch=tmp_path / "scratch", options=options)

    return make


def kill_at(step: int, rank: int | None = None) -> None:
    """SIGKILL in that step, in this rank only if one is given."""

    def act() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank is not None:
        hooks.at_rank(rank, ("first", step), act)
    else:
        tiny.HOOKS["first"] = lambda reached: act() if reached == step else None


@pytest.mark.parametrize(
    ("ranks", "epochs", "steps"),
    [
        (1, 1, (7,)),
        pytest.param(1, 5, (7, 22, 38), marks=pytest.mark.slow),
        pytest.param(2, 5, (7, 22, 38), marks=pytest.mark.slow),
    ],
)
def test_killed_in_some_steps_it_ends_as_if_nothing_had_been(
    new: Callable[..., Run], ranks: int, epochs: int, steps: Sequence[int]
) -> None:
    run, whole = (new(name, epochs, "5steps") for name in ("run", "whole"))
    assert whole.attempt_with_ranks(ranks) == [0] * ranks
    lines = list(whole.lineage().values())
    assert len(lines) >= 8 * epochs
    if epochs > 1:
        assert {line["metrics"]["objects"] > 0 for line in lines} == {True, False}
        shapes = {line["metrics"]["shape"] for line in lines}
        assert len(shapes) > len(lines) / 2, "nearly every step has batches of other shapes"
    for step in steps:
        kill_at(step, rank=ranks - 1)
        assert all(run.attempt_with_ranks(ranks))
        tiny.HOOKS.clear()
    assert run.attempt_with_ranks(ranks) == [0] * ranks
    assert_equal(run, whole)
