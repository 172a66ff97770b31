"""`auto` saves as often as pays, within its bounds."""

import math

import pytest

from contract.auto_interval import choose_interval


def seconds_of(
    cost: float, durable: float = 0.0, life: float = 7200.0, epoch: float | None = None
) -> tuple[float, str]:
    choice = choose_interval(
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
    assert seconds_of(1.0, epoch=50.0) == (100.0, "at most 2 epochs")


def test_saving_takes_two_percent_at_most_even_beyond_two_epochs() -> None:
    seconds, why = seconds_of(30.0, epoch=10.0)
    assert seconds == 1500.0
    assert "2%" in why


def test_one_save_is_under_way_at_a_time() -> None:
    assert seconds_of(0.1, durable=500.0) == (500.0, "only one save runs at a time")


def test_a_save_that_costs_nothing_is_not_made_all_the_time() -> None:
    assert seconds_of(0.0)[0] == 60.0
