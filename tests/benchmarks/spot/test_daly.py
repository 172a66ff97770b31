"""Daly's interval: near Young's for short saves, and the exact optimum for any."""

import math

import pytest

from benchmarks.spot.daly import daly_interval


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
