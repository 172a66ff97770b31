"""Families by use and cost level, and cheaper sizes for endpoints that use little of theirs."""

import pytest

from sizing import catalogue
from sizing.catalogue import Price
from sizing.cli.catalogue_command import family_rows
from sizing.select.rightsizing import TARGET_PERCENT, busy_percent, rightsize


def prices(size: str) -> tuple[Price | None, Price | None]:
    known = catalogue.find(size).on_demand_usd_per_hour
    return (catalogue.hourly_price(size) if known else None), None


def test_a_v100_that_is_a_tenth_busy_is_replaced_by_a_t4() -> None:
    # Which has less memory than a V100.
    assert "g4dn.xlarge" not in {move.size for move in rightsize("p3.2xlarge", 10, prices)}
    first = rightsize("p3.2xlarge", 10, prices, memory_mib=14_000)[0]
    assert first.size == "g4dn.xlarge"
    # 900 GB/s of a V100 against 320 of a T4.
    assert first.busy_percent == pytest.approx(10 * 900 / 320)
    assert first.saving_percent > 80


def test_a_busy_gpu_keeps_its_size() -> None:
    assert rightsize("g5.xlarge", 95, prices) == []


def test_memory_in_use_decides_what_is_small_enough() -> None:
    assert "g4dn.xlarge" not in {m.size for m in rightsize("g5.12xlarge", 5, prices)}
    assert rightsize("g5.12xlarge", 5, prices, memory_mib=9000)[0].size == "g4dn.xlarge"


def test_every_move_is_cheaper_and_not_too_busy() -> None:
    for now, percent in (("p3.2xlarge", 10.0), ("g5.12xlarge", 15.0), ("c5.4xlarge", 8.0)):
        for move in rightsize(now, percent, prices):
            assert move.saving_percent > 0
            assert move.busy_percent <= TARGET_PERCENT


def test_a_burstable_size_must_sustain_the_load() -> None:
    found = {m.size for m in rightsize("c5.2xlarge", 12, prices, memory_mib=2048)}
    assert "c5.large" in found
    # 48 % of two vCPUs; its credits sustain 20 %.
    assert "t3.medium" not in found
    assert "t3.nano" not in found


def test_fails_on_a_share_that_is_none() -> None:
    with pytest.raises(ValueError, match="use more than 0, at most 100"):
        busy_percent("g5.xlarge", 0, "g4dn.xlarge")


def test_every_family_has_a_use_and_a_level() -> None:
    found = family_rows()
    assert {each["family"] for each in found} == set(catalogue.sizes.families())
    assert all(each["use"] for each in found)
    known = [each["usd_per_hour_from"] for each in found if each["usd_per_hour_from"] is not None]
    assert known == sorted(known)
    levels = {each["family"]: each["cost_level"] for each in found}
    assert [levels[name] for name in ("t3", "c5", "g4dn", "p3")] == [
        *("Low", "Moderate", "High", "Very High"),
    ]
