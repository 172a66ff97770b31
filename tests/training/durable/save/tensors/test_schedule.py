"""When a save is due and what it costs, as `auto` measures it; what a notice has time for."""

from pathlib import Path

import pytest

from contract.auto_interval import MEAN_LIFE_SECONDS
from contract.grammar import parse_interval
from tests.training.runs import wait_for
from tests.training.save_scene import Scene
from training.durable.record.head import Position
from training.durable.save.publish import Cost
from training.durable.save.tensors.policy import CheckpointPolicy
from training.durable.save.tensors.schedule import (
    SaveBudget,
    Schedule,
    _SavePlan,
    _StepPace,
    estimate,
)


class Clock:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def step(self, pace: _StepPace, step: int, seconds: float, *, is_saving: bool) -> None:
        pace.begin_step(position(step - 1), is_saving=is_saving)
        self.now += seconds
        pace.end_step(position(step))


def position(step: int, stage: str = "a") -> Position:
    return Position(stage=stage, stage_step=step, step=step)


def auto(spent_seconds: float = 0.0, interruptions: int = 0) -> Schedule:
    interval = parse_interval("auto")
    return Schedule(interval, spent_seconds=spent_seconds, interruptions=interruptions)


def is_due(schedule: Schedule, epoch_seconds: float | None = None) -> bool:
    return schedule.is_due(position(1), 10, is_saving=False, epoch_seconds=epoch_seconds)


def life_seconds(schedule: Schedule) -> float:
    choice = schedule.measure(1.0, 2.0)
    assert choice is not None
    return choice.life_seconds


def test_the_run_s_own_history_moves_the_rate() -> None:
    hour = 3600.0
    assert life_seconds(auto()) == pytest.approx(MEAN_LIFE_SECONDS, rel=0.01)
    rough, quiet = life_seconds(auto(2 * hour, 7)), life_seconds(auto(40 * hour, 1))
    assert rough == pytest.approx((MEAN_LIFE_SECONDS + 2 * hour) / 8, rel=0.01)
    assert quiet > 10 * rough


def test_what_the_account_s_runs_know_makes_lives_longer_and_never_shorter() -> None:
    for planned, expected in ((9 * 3600.0, 9 * 3600.0), (60.0, MEAN_LIFE_SECONDS)):
        schedule = Schedule(parse_interval("auto"), planned_life_seconds=planned)
        assert life_seconds(schedule) == pytest.approx(expected, rel=0.01)


def test_the_first_save_comes_early_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, schedule = Clock(monkeypatch), auto()
    clock.now = 59.0
    assert not is_due(schedule)
    clock.now = 60.0
    assert is_due(schedule)
    choice = schedule.measure(1.0, 2.0)
    assert choice is not None
    assert not is_due(schedule)
    clock.now = choice.seconds
    assert is_due(schedule)


def test_only_a_choice_that_changes_something_is_told() -> None:
    schedule = auto()
    assert schedule.measure(1.0, 2.0)
    assert not schedule.measure(1.1, 2.0)
    assert schedule.measure(4.0, 2.0)


def test_two_epochs_are_the_longest_time_to_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, schedule = Clock(monkeypatch), auto()
    clock.now = 40.0
    assert is_due(schedule, epoch_seconds=20.0)
    assert not is_due(schedule, epoch_seconds=20.5)


def test_a_save_costs_what_steps_beside_it_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), _StepPace()
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
    clock, pace = Clock(monkeypatch), _StepPace()
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
    choice = scene.schedule._choice
    assert choice is not None
    assert (choice.cost_seconds, choice.durable_seconds) == (10.0, 12.0)
    scene.context.metrics.close()


def budget(
    left: float, need: float, finish: float | None = None, *, is_measured: bool = True
) -> SaveBudget:
    cost = Cost(
        bytes=4_460_000_000, save_seconds=0.4, upload_seconds=need - 0.4, is_measured=is_measured
    )
    return SaveBudget(
        cost=cost, step_seconds=0.8, reserve_seconds=2.0, seconds_left=left, finish_seconds=finish
    )


@pytest.mark.parametrize(
    ("left", "need", "finish", "plan"),
    [
        (110.0, 14.0, None, "save"),
        (16.0, 14.0, None, "save"),
        (15.9, 14.0, None, "give up"),
        (110.0, 14.0, 10.0, "finish, then save"),
        (50.0, 14.0, 10.0, "save"),
        (15.0, 14.0, 10.0, "finish"),
        (11.0, 14.0, 10.0, "give up"),
        (0.0, 0.4, 0.0, "give up"),
    ],
)
def test_the_newest_state_that_fits_is_saved(
    left: float, need: float, finish: float | None, plan: _SavePlan
) -> None:
    assert budget(left, need, finish).plan == plan


def test_an_assumed_rate_refuses_nothing_but_what_no_save_may_use() -> None:
    assert budget(2.1, 14.0, is_measured=False).plan == "save"
    assert budget(2.0, 14.0, is_measured=False).plan == "give up"


def test_every_figure_of_the_arithmetic_is_said() -> None:
    assert str(budget(101.2, 14.0, 3.0)) == (
        "4460.0 MB: 0.80 s to the boundary, then 0.40 s to save + 13.60 s to upload (measured) + "
        "2.0 s in reserve, 101.2 s left; a save in progress needs 3.00 s more"
    )


def test_a_larger_state_is_expected_to_take_longer() -> None:
    last = Cost(bytes=100, save_seconds=1.0, upload_seconds=3.0)
    assert estimate(200, last).seconds == pytest.approx(8.0)
    assert not estimate(200, None).is_measured
