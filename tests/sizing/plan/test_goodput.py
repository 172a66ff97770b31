"""The forecast of where paid time goes: all of it, and as the plan's assumptions have it."""

from pathlib import Path

import pytest

from contract.goodput import USEFUL, WAITING
from sizing.plan.goodput import planned_goodput
from tests.sizing.sample_plan import plan


def paid(shares: dict[str, float]) -> float:
    return sum(share for cause, share in shares.items() if cause != WAITING)


def test_the_shares_are_of_all_paid_time_and_the_work_is_the_simulated_goodput(
    tmp_path: Path,
) -> None:
    found = plan(tmp_path)
    shares = planned_goodput(found)
    assert paid(shares) == pytest.approx(1.0)
    assert min(shares.values()) > 0
    work = sum(shares.get(each, 0.0) for each in (USEFUL, "data_wait", "evaluation"))
    assert found.spot is not None
    assert work == pytest.approx(found.spot.goodput)


def test_more_interruptions_cost_more_starts_and_less_is_useful(tmp_path: Path) -> None:
    rare, often = (planned_goodput(plan(tmp_path, rate_per_hour=rate)) for rate in (0.01, 2.0))
    assert paid(often) == pytest.approx(1.0)
    assert rare[USEFUL] > often[USEFUL]
    assert rare["boot"] < often["boot"]
    assert rare.get("repeated", 0.0) < often["repeated"]
