"""The account's Spot history: fades, merges by run, survives a file, and lets pools rest."""

import pytest

from sizing.fallback.pools import HALF_LIFE_HOURS, PoolHistory, PoolRecord

HOUR = 3600.0


def test_records_fade_and_add_up_in_any_order() -> None:
    old = PoolRecord(at=0, up_hours=8, losses=4, wait_hours=2, waits=4)
    new = PoolRecord(at=HALF_LIFE_HOURS * HOUR, up_hours=1, losses=1, wait_hours=1, waits=1)
    both = old + new
    assert both == new + old
    assert (both.up_hours, both.losses, both.wait_hours, both.waits) == (5, 3, 2, 3)
    assert both.at == new.at


def test_two_losses_in_short_order_let_a_pool_rest_and_time_ends_it() -> None:
    one = PoolRecord(at=0, losses=1, recent=1)
    assert not one.is_resting(0)
    assert (one + one).is_resting(0.9 * HOUR)
    assert not (one + one).is_resting(1.1 * HOUR)


def test_the_newest_record_of_a_run_counts_once_however_often_it_is_merged() -> None:
    early, late = ({"g5.xlarge use1-az1": PoolRecord(at=at, losses=at)} for at in (1.0, 2.0))
    mine, theirs = PoolHistory({"a": late}), PoolHistory({"a": early, "b": early})
    both = mine.merged(theirs)
    assert both == theirs.merged(mine) == both.merged(theirs).merged(mine)
    assert both.runs == {"a": late, "b": early}
    assert both.pools["g5.xlarge use1-az1"].losses == pytest.approx(3, abs=1e-4)
    assert PoolHistory.from_json(both.to_json()) == both


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"runs": []}', '{"runs": {"a": {"p": {"losses": -1}}}}',
     '{"runs": {"a": {"p": {"lost": 1}}}}', '{"runs": {"a": {"p": {"losses": "x"}}}}'],
)  # fmt: skip
def test_fails_on_what_is_no_history(text: str) -> None:
    with pytest.raises(ValueError, match="not a history of Spot pools"):
        PoolHistory.from_json(text)
