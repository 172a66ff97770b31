"""The checkpoint interval: Young/Daly where nothing warns, longer where the notice saves."""

import math

import pytest

from sizing.spot.interval import daly_interval, recommend_interval


@pytest.mark.parametrize(
    ("mean_hours", "checkpoint", "minutes"),
    # Young's figures, for checkpoints that are short against the mean life.
    [(24, 10, 21.9), (168, 60, 142), (3.4, 1, 2.6), (2.1, 15, 7.9)],
)
def test_daly_is_near_young_for_short_saves(
    mean_hours: float, checkpoint: float, minutes: float
) -> None:
    seconds = daly_interval(checkpoint_seconds=checkpoint, rate_per_hour=1 / mean_hours)
    assert seconds / 60 == pytest.approx(minutes, rel=0.04)


@pytest.mark.parametrize("checkpoint", [0.01, 5.0, 600.0, 7200.0, 40_000.0])
def test_daly_is_the_exact_optimum(checkpoint: float) -> None:
    def wall_per_second_of_work(interval: float) -> float:
        return math.expm1((interval + checkpoint) / 3600) / interval

    best = daly_interval(checkpoint_seconds=checkpoint, rate_per_hour=1.0)
    assert best < 3600
    assert all(
        wall_per_second_of_work(best) <= wall_per_second_of_work(best * scale)
        for scale in (0.8, 0.99, 1.01, 1.25)
    )


def test_free_saves_are_taken_all_the_time_and_calm_runs_never_save() -> None:
    assert daly_interval(checkpoint_seconds=0, rate_per_hour=1) == 0
    assert daly_interval(checkpoint_seconds=10, rate_per_hour=0) == math.inf


def test_a_notice_that_fits_makes_the_interval_longer() -> None:
    asked = {"checkpoint_seconds": 15.0, "rate_per_hour": 0.3}
    warned = recommend_interval(**asked, notice_fits=True)
    unwarned = recommend_interval(**asked, notice_fits=False)
    # One in twenty counts: sqrt(20) times as long.
    assert warned.seconds / unwarned.seconds == pytest.approx(math.sqrt(20), rel=0.05)
    assert "5% of interruptions" in warned.why
    assert "does not fit the notice" in unwarned.why


def test_two_epochs_bound_the_interval_unless_they_are_too_short_to_save() -> None:
    asked = {"checkpoint_seconds": 4.0, "rate_per_hour": 0.01, "notice_fits": True}
    assert recommend_interval(**asked, epoch_seconds=300).seconds == 600
    short = recommend_interval(**asked, epoch_seconds=3)
    assert short.seconds == pytest.approx(196)
    assert 4 / (4 + short.seconds) == pytest.approx(0.02)
    assert "2 epochs" in short.why


def test_fails_on_a_share_that_is_none() -> None:
    with pytest.raises(ValueError, match="share between 0 and 1, got 2"):
        recommend_interval(
            checkpoint_seconds=1, rate_per_hour=1, notice_fits=True, notice_arrives=2
        )
    with pytest.raises(ValueError, match=r"checkpoint_seconds must be a finite number .* got -1"):
        daly_interval(checkpoint_seconds=-1, rate_per_hour=1)
