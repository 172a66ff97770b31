"""`auto` saves as often as pays, within its bounds, by what was measured."""

import math

import pytest

from training.checkpoint.interval import MEAN_LIFE_SECONDS, AutoInterval, choose


def seconds_of(
    cost: float, durable: float = 0.0, life: float = 7200.0, epoch: float | None = None
) -> tuple[float, str]:
    choice = choose(
        cost_seconds=cost, durable_seconds=durable, life_seconds=life, epoch_seconds=epoch
    )
    return choice.seconds, choice.why


def test_young_daly_sets_it_where_no_bound_does() -> None:
    seconds, why = seconds_of(1.0, epoch=3600.0)
    assert seconds == pytest.approx(math.sqrt(2 * 7200))
    assert why == "Young/Daly"


def test_it_is_where_the_expected_loss_is_least() -> None:
    best, _ = seconds_of(4.0)

    def loss(interval: float) -> float:
        return 4.0 / interval + interval / 2 / 7200.0

    assert loss(best) < min(loss(0.9 * best), loss(1.1 * best))


def test_two_epochs_are_the_most() -> None:
    assert seconds_of(1.0, epoch=50.0) == (100.0, "2 epochs, the most")


def test_saving_takes_two_percent_at_most_even_beyond_two_epochs() -> None:
    seconds, why = seconds_of(30.0, epoch=10.0)
    assert seconds == 1500.0
    assert "2%" in why


def test_one_save_is_under_way_at_a_time() -> None:
    assert seconds_of(0.1, durable=500.0) == (500.0, "one save is under way at a time")


def test_a_save_that_costs_nothing_is_not_made_all_the_time() -> None:
    assert seconds_of(0.0)[0] == 60.0


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
