"""The margins of a notice fit into each other, and the plan's idle time is the trainer's."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.notice import exit_reserve, idle_seconds, last_save_margin, save_reserve
from training.durable.attempt.notice import ExtraTime, Interruption, Notice


@given(notice=st.floats(0.5, 120))
def test_a_last_save_in_time_is_over_before_the_forced_exit_starts(notice: float) -> None:
    assert last_save_margin(notice) > save_reserve(notice) + exit_reserve(notice)


@pytest.mark.parametrize(
    ("notice", "margin", "reserve", "exit_needs"),
    [(120.0, 10.0, 2.0, 1.0), (20.0, 4.0, 2.0, 1.0), (5.0, 1.0, 0.5, 0.25)],
)
def test_of_a_short_notice_a_share_is_kept(
    notice: float, margin: float, reserve: float, exit_needs: float
) -> None:
    found = (last_save_margin(notice), save_reserve(notice), exit_reserve(notice))
    assert found == (margin, reserve, exit_needs)


@given(save=st.floats(0.01, 200), step=st.floats(0.001, 60), notice=st.floats(2, 120))
def test_the_plan_reckons_with_the_trainers_own_reserves(
    save: float, step: float, notice: float
) -> None:
    interruption = Interruption(budget_seconds=120)
    interruption.notice = Notice(cause="notice", received=0.0, deadline=notice, is_dated=True)
    trainer = ExtraTime(interruption, "train-on")
    idle = idle_seconds(save_seconds=save, step_seconds=step, notice_seconds=notice)
    with patch("time.monotonic", return_value=save):  # the first save is over
        goes_on = trainer.would_allow(step, save)
    if abs(idle - notice) > 1e-6:
        assert goes_on
    elif idle == notice:
        with patch("time.monotonic", return_value=save + 1e-6):
            assert not trainer.would_allow(step, save)
