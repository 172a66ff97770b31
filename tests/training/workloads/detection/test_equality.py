"""The detector under kills and notices ends as if nothing had been: weights, losses, samples."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.training import hooks, tiny
from tests.training.durable.attempt import machine as interruption
from tests.training.durable.attempt.machine import Clock, Machine
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


@pytest.mark.slow  # the test below has one rank, durable/attempt ranks of another workload
def test_two_ranks_train_on_after_a_notice_are_killed_and_end_as_if_nothing_had_been(
    new: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its steps take seconds on a busy machine: of EC2's notice they are nothing.
    monkeypatch.setattr(interruption, "NOTICE", 120.0)
    run, whole = (new(name, 2, "1000steps") for name in ("run", "whole"))
    assert whole.attempt_with_ranks(2) == [0, 0]
    machine = Machine(run, tmp_path / "notice.json", Clock())
    machine.seconds = 10.0  # of each of the two ranks in each step
    machine.trains_on_when_one_of_two_is_told(rank=1)
    # On the next machine.
    kill_at(machine.last_step, rank=1)
    assert all(run.attempt_with_ranks(2))
    tiny.HOOKS.clear()
    machine.go_on(whole, ranks=2)

    lines = list(whole.lineage().values())
    assert any(line["metrics"]["objects"] == 0 for line in lines), "a step without any object"
    assert any(line["metrics"]["objects"] > 0 for line in lines)
    shapes = {line["metrics"]["shape"] for line in lines}
    assert len(shapes) > len(lines) / 2, "nearly every step has batches of other shapes"


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
    assert len(whole.lineage()) >= 8 * epochs
    for step in steps:
        kill_at(step, rank=ranks - 1)
        assert all(run.attempt_with_ranks(ranks))
        tiny.HOOKS.clear()
    assert run.attempt_with_ranks(ranks) == [0] * ranks
    assert_equal(run, whole)
