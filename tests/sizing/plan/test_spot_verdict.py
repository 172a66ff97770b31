"""Whether Spot suits a run, and what an interruption costs."""

from dataclasses import replace
from pathlib import Path

import pytest

from sizing.plan.report import summary
from sizing.plan.spot_verdict import spot_verdict
from tests.sizing import sample_footprints
from tests.sizing.sample_plan import plan


def test_a_short_run_that_saves_within_the_notice_suits_spot(tmp_path: Path) -> None:
    made = plan(tmp_path, notice_seconds=60.0)
    found = spot_verdict(made)
    assert found.suits == "yes"
    took = f"{made.notice.total:.0f} of 50 s"
    assert f"a notice is enough to save: {took}" in "; ".join(found.reasons)


def test_no_saving_speaks_against_spot(tmp_path: Path) -> None:
    assert spot_verdict(plan(tmp_path), saving=3).suits == "no"
    assert spot_verdict(plan(tmp_path), saving=60).suits == "yes"


def test_many_interruptions_or_a_time_limit_ask_for_care(tmp_path: Path) -> None:
    long = {"epochs": 200}
    limited = plan(tmp_path, footprint=long, rate_per_hour=0.1, max_hours=0.1)
    found = spot_verdict(limited)
    assert found.suits == "with care"
    assert found.reasons[0].endswith("the limit is 0.1 h")


@pytest.mark.parametrize(("share", "suits"), [(0.4, "yes"), (0.7, "with care")])
def test_interruptions_that_take_half_as_long_as_the_work_ask_for_care(
    tmp_path: Path, share: float, suits: str
) -> None:
    made = plan(tmp_path)
    assert made.spot is not None
    losses = share * made.hours_on_demand * 3600 / made.interruption_seconds
    lossy = replace(made, spot=replace(made.spot, interruptions=losses))
    assert spot_verdict(lossy, saving=60).suits == suits


def test_a_checkpoint_too_large_for_the_notice_asks_for_care(tmp_path: Path) -> None:
    large = {"checkpoint_bytes": 60_000 * sample_footprints.MIB}
    made = plan(tmp_path, footprint=large, rate_per_hour=0.01)
    assert "does not fit the notice" in spot_verdict(made).reasons[0]
    # What was not saved is lost on top of the restart.
    assert made.interruption_seconds > made.restart.seconds


def test_an_interruption_costs_its_restart_at_the_spot_price(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert made.interruption_seconds == made.restart.seconds
    hours = made.restart.seconds / 3600
    price = made.inputs.spot_price.usd_per_hour
    assert made.usd_of_interruption == pytest.approx(hours * price)


def test_each_machine_pays_for_the_loading_of_its_root_volume(tmp_path: Path) -> None:
    free, made = plan(tmp_path), plan(tmp_path, root_initialization_mib_per_second=300.0)
    assert free.usd_of_initializations == 0
    assert "root volumes" not in dict(summary(free))
    assert made.spot is not None
    machines = 1 + made.spot.interruptions
    assert made.usd_of_initializations == pytest.approx(0.162 * machines)
    assert made.usd_of_interruption == pytest.approx(free.usd_of_interruption + 0.162)
    assert dict(summary(made))["root volumes"].startswith("$0.162 for each machine")
    two = plan(tmp_path, root_initialization_mib_per_second=300.0, hosts=2)
    assert two.usd_of_initialization == pytest.approx(2 * 0.162)
