"""Credits: what a burstable size earns, spends and pays for."""

import pytest

from sizing import catalogue
from sizing.models.burstable import CREDITS_PER_HOUR, day_of_work


def test_at_its_baseline_a_size_spends_what_it_earns() -> None:
    # t3.large: 36 credits an hour on two vCPUs is 30 %.
    day = day_of_work("t3.large", cpu_percent=30, hours=10, usd_per_hour=0.0832)
    assert day.baseline_percent == 30
    assert day.spent == day.earned == 360
    assert (day.surplus, day.usd) == (0, pytest.approx(0.832))


def test_what_is_not_earned_costs_five_cents_a_vcpu_hour() -> None:
    day = day_of_work("t3.medium", cpu_percent=100, hours=1, usd_per_hour=0.0416)
    # Two vCPUs for an hour are 120 credits, 24 of them earned: 1.6 vCPU hours.
    assert day.surplus == 96
    assert day.usd == pytest.approx(0.0416 + 1.6 * 0.05)


def test_every_burstable_size_of_the_catalogue_has_its_credits() -> None:
    sizes = catalogue.instances().values()
    assert {each.size for each in sizes if each.kind == "burstable"} == CREDITS_PER_HOUR.keys()
