"""`auto` measures what a save costs, and chooses by that."""

import pytest

from contract.auto_interval import MEAN_LIFE_SECONDS
from training.checkpoint.schedule import AutoInterval


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
