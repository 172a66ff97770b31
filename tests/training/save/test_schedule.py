"""`auto` measures what a save costs, and chooses by that."""

from pathlib import Path

import pytest

from contract.auto_interval import MEAN_LIFE_SECONDS
from tests.training.runs import wait_for
from tests.training.save_scene import Scene
from training.record.head import Position
from training.save.policy import CheckpointPolicy
from training.save.schedule import AutoInterval, StepPace


class Clock:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def step(self, pace: StepPace, step: int, seconds: float, *, is_saving: bool) -> None:
        pace.begin_step(position(step - 1), is_saving=is_saving)
        self.now += seconds
        pace.end_step(position(step))


def position(step: int, stage: str = "a") -> Position:
    return Position(stage=stage, stage_step=step, step=step)


def test_the_run_s_own_history_moves_the_rate() -> None:
    hour = 3600.0
    assert AutoInterval(spent_seconds=0.0, interruptions=0).life_seconds == pytest.approx(
        MEAN_LIFE_SECONDS, rel=0.01
    )
    rough = AutoInterval(spent_seconds=2 * hour, interruptions=7).life_seconds
    quiet = AutoInterval(spent_seconds=40 * hour, interruptions=1).life_seconds
    assert rough == pytest.approx((MEAN_LIFE_SECONDS + 2 * hour) / 8, rel=0.01)
    assert quiet > 10 * rough


def test_the_first_save_comes_early_to_be_measured() -> None:
    auto = AutoInterval(spent_seconds=0.0, interruptions=0)
    assert not auto.is_due(59.0)
    assert auto.is_due(60.0)
    assert auto.measure(1.0, 2.0)
    assert auto.choice is not None
    assert not auto.is_due(60.0)
    assert auto.is_due(auto.choice.seconds)


def test_only_a_choice_that_changes_something_is_told() -> None:
    auto = AutoInterval(spent_seconds=0.0, interruptions=0)
    assert auto.measure(1.0, 2.0)
    assert not auto.measure(1.1, 2.0)
    assert auto.measure(4.0, 2.0)


def test_the_pace_of_the_stage_gives_the_length_of_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    auto = AutoInterval(spent_seconds=0.0, interruptions=0)
    for step in range(5):
        auto.reach("a", step, steps_per_epoch=10)
        now += 2.0
    assert auto.is_due(40.0)
    assert not auto.is_due(39.0)
    auto.reach("b", 0, steps_per_epoch=10)
    assert not auto.is_due(40.0), "another stage has another pace"


def test_a_save_costs_what_steps_beside_it_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), StepPace()
    for step in range(1, 6):
        clock.step(pace, step, 1.0, is_saving=False)
    for step in range(6, 10):
        clock.step(pace, step, 3.0, is_saving=True)
    assert pace.take_lost_seconds(12.0) == pytest.approx(8.0)
    for step in range(10, 13):
        clock.step(pace, step, 0.9, is_saving=True)
    assert pace.take_lost_seconds(12.0) == 0.0


def test_neither_an_evaluation_nor_another_stage_counts_as_a_slow_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, pace = Clock(monkeypatch), StepPace()
    for step in range(1, 6):
        clock.step(pace, step, 1.0, is_saving=False)
    clock.step(pace, 6, 1.5, is_saving=True)
    pace.begin_step(position(6), is_saving=True)
    clock.now += 100.0
    pace.end_step(position(6))  # after the evaluation
    assert pace.take_lost_seconds(60.0) == pytest.approx(0.5)
    pace.begin_step(position(6), is_saving=True)
    clock.now += 100.0
    pace.end_step(position(7, stage="b"))
    assert pace.take_lost_seconds(3.0) == 3.0, "nothing is known of this stage: all of the save"


def test_auto_counts_what_a_save_behind_the_training_slows_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, clock = Scene(tmp_path, "auto"), Clock(monkeypatch)
    step = 0
    policy = CheckpointPolicy(
        scene.context, scene.checkpointer, 1000, lambda: scene.capture(step), is_sharded=False
    )
    scene.store.gate.clear()
    while not policy.save_if_due(position(step)):
        step, clock.now = step + 1, clock.now + 1.0
    for _ in range(4):
        step, clock.now = step + 1, clock.now + 3.0
        policy.save_if_due(position(step))
    scene.store.gate.set()
    wait_for(lambda: scene.checkpointer.wait(0))
    step, clock.now = step + 1, clock.now + 3.0
    policy.save_if_due(position(step))
    choice = scene.schedule._auto.choice
    assert choice is not None
    assert (choice.cost_seconds, choice.durable_seconds) == (10.0, 12.0)
    scene.context.metrics.close()
