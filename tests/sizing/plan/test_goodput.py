"""The forecast of where paid time goes: all of it, and as the plan's assumptions have it."""

from pathlib import Path

import pytest

from contract.goodput import PLANNED, USEFUL, WAITING
from sizing.plan.finished_run import compare
from sizing.plan.goodput import planned_goodput
from tests.sizing.plan.test_finished_run import write_run
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


def test_a_finished_run_is_compared_with_what_was_planned_then(tmp_path: Path) -> None:
    bought = {"goodput": 0.4, "seconds": {}, "usd": {"useful": 2.0, "boot": 1.0}}
    run = write_run(tmp_path / "then", 0.1, goodput=bought, prediction={PLANNED + USEFUL: 0.8})
    rows = {row.what: row for row in compare(run, plan(tmp_path))}
    assert (rows["goodput"].predicted, rows["goodput"].actual) == (0.8, 0.4)
    assert rows["goodput"].verdict.startswith("correct the cause")
    assert rows["dollars (Spot)"].actual == 3.0
    older = write_run(tmp_path / "older", 0.1)
    rows = {row.what: row for row in compare(older, plan(tmp_path))}
    assert rows["goodput"].actual is None
