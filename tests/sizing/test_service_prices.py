"""What a gp3 volume costs: the size, and only what is above the included speed."""

import pytest

from sizing.service_prices import HOURS_PER_MONTH, ebs_usd_per_hour, initialization_usd


def test_the_included_speed_costs_nothing() -> None:
    assert ebs_usd_per_hour(200, 3000, 125) * HOURS_PER_MONTH == pytest.approx(16.0)
    assert ebs_usd_per_hour(200, 0, 0) == ebs_usd_per_hour(200, 3000, 125)


def test_speed_above_it_is_charged() -> None:
    # 4,628 IOPS at $0.005 and 1,782 MiB/s at $0.04.
    monthly = ebs_usd_per_hour(200, 7628, 1907) * HOURS_PER_MONTH
    assert monthly == pytest.approx(16.0 + 23.14 + 71.28)


def test_loading_a_volume_is_charged_by_its_data_and_its_rate() -> None:
    # Example 12 of AWS's price page, as #5165 of terraform-aws-github-runner has it.
    assert initialization_usd(200, 250) == pytest.approx(0.60)
    assert initialization_usd(300) == pytest.approx(0.162)
    assert initialization_usd(0) == 0
