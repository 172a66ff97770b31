"""What to do at a notice follows from what a save takes and what is left."""

import pytest

from training.save.publish import Cost
from training.save.schedule import SaveBudget, _SavePlan, estimate


def budget(
    left: float, need: float, finish: float | None = None, *, is_measured: bool = True
) -> SaveBudget:
    cost = Cost(
        bytes=4_460_000_000,
        save_seconds=0.4,
        upload_seconds=need - 0.4,
        is_measured=is_measured,
    )
    return SaveBudget(
        cost=cost,
        step_seconds=0.8,
        reserve_seconds=2.0,
        seconds_left=left,
        finish_seconds=finish,
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


def test_an_assumed_rate_refuses_nothing_but_a_notice_that_is_over() -> None:
    assert budget(1.0, 14.0, is_measured=False).plan == "save"
    assert budget(-1.0, 14.0, is_measured=False).plan == "give up"


def test_every_figure_of_the_arithmetic_is_said() -> None:
    assert str(budget(101.2, 14.0, 3.0)) == (
        "4460.0 MB: 0.80 s to the boundary, then 0.40 s to save + 13.60 s to upload (measured) + "
        "2.0 s in reserve, 101.2 s left; a save in progress needs 3.00 s more"
    )


def test_a_larger_state_is_expected_to_take_longer() -> None:
    last = Cost(bytes=100, save_seconds=1.0, upload_seconds=3.0)
    assert estimate(200, last).seconds == pytest.approx(8.0)
    assert not estimate(200, None).is_measured
