"""`auto` saves as often as pays, within its bounds."""

import math

import pytest

from contract.auto_interval import choose_interval


@pytest.mark.parametrize(
    ("cost", "durable", "epoch", "seconds", "why"),
    [
        (1.0, 0.0, 3600.0, math.sqrt(2 * 7200), "Young/Daly"),
        (1.0, 0.0, 50.0, 100.0, "at most 2 epochs"),
        # Even beyond two epochs.
        (30.0, 0.0, 10.0, 1500.0, "2%"),
        # No notice is long enough for it, and 2 % would be one save in 17 hours.
        (1208.0, 1208.0, None, math.sqrt(2 * 1208 * 7200), "Young/Daly"),
        (0.1, 500.0, None, 500.0, "only one save runs at a time"),
        (0.0, 0.0, None, 60.0, ""),
    ],
)
def test_an_interval_and_why(
    cost: float, durable: float, epoch: float | None, seconds: float, why: str
) -> None:
    found = choose_interval(
        cost_seconds=cost, durable_seconds=durable, life_seconds=7200.0, epoch_seconds=epoch
    )
    assert found.seconds == pytest.approx(seconds)
    assert why in found.why


def test_it_is_where_the_expected_loss_is_least() -> None:
    best = choose_interval(
        cost_seconds=4.0, durable_seconds=0.0, life_seconds=7200.0, epoch_seconds=None
    ).seconds

    def loss(interval: float) -> float:
        return 4.0 / interval + interval / 2 / 7200.0

    assert loss(best) < min(loss(0.9 * best), loss(1.1 * best))
