"""A restart waits for what its first step reads, and slow data slows down the steps after it."""

import random
from dataclasses import asdict
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizing import catalogue
from sizing.models.constants import Constants
from sizing.models.data_path import Rate, network_rate, volume_rate
from sizing.models.restart import ANYWHERE, Restart, Sync

LINE = Rate(baseline=1.0, burst=1.0, burst_seconds=0.0)
UNKNOWN = Rate(baseline=0.0, burst=0.0, burst_seconds=0.0)
START = Constants(launch_seconds=10, user_data_seconds=4, first_step_seconds=50)


def sync(**changes: object) -> Sync:
    """1,000 MB at 1 MB/s, of which the first step reads 100."""
    usual = {
        "network": LINE,
        "volume": UNKNOWN,
        "num_bytes": 1e9,
        "first_bytes": 1e8,
        "epoch_seconds": 400.0,
        "in_flight_bytes": 0.0,
    }
    return Sync(**usual | changes)  # type: ignore[arg-type]


def played(epoch_seconds: float, passed: float) -> float:
    """Play the rest of an epoch and the next two, file by file; return the steps' waits.

    The line is never idle: each epoch's files are asked for when it begins, before all others.
    """
    num, luck = 4000, random.Random(1)
    each, arrival = epoch_seconds / num, 1000.0 / num
    orders = [luck.sample(range(num), num) for _ in range(3)]
    orders[0] = orders[0][int(passed * num) :]
    there: dict[int, float] = {}
    line = now = waits = 0.0
    for files in orders:
        asked = list(dict.fromkeys([*files, *range(num)]))
        missing = [file for file in asked if file not in there]
        there |= {file: line + count * arrival for count, file in enumerate(missing, 1)}
        for file in files:
            waits += max(0.0, there[file] - now)
            now = max(now, there[file]) + each
        there = {file: at for file, at in there.items() if at <= now}
        line = max(there.values())
    return waits


def test_what_the_first_step_reads_is_waited_for_once_the_trainer_has_asked() -> None:
    first = sync().restart(START)
    # 50 of 1,000 s of the sync are over when the trainer asks: so much of the 100 may be there.
    assert first.sync == pytest.approx(95)
    assert first.to_training == pytest.approx(10 + 4 + 50 + 95)
    assert first.seconds == pytest.approx(first.to_training + first.data_wait)
    assert f"waits for the dataset's sync {first.sync:.0f} before" in first.sentence()


@pytest.mark.parametrize("changes", [{}, {"first_bytes": 1e9}, {"is_of_program": True}], ids=repr)
@pytest.mark.parametrize("epoch_seconds", [100.0, 400.0, 5000.0])
def test_files_that_take_as_long_as_their_bytes_are_waited_for_alike(
    changes: dict[str, object], epoch_seconds: float
) -> None:
    given = {"epoch_seconds": epoch_seconds, **changes}
    bytes_alone = sync(**given).restart(START, passed=ANYWHERE)
    files_alone = sync(**given, network=UNKNOWN, file_seconds=1000.0)
    for one in (files_alone, sync(**given, file_seconds=1000.0)):
        assert asdict(one.restart(START, passed=ANYWHERE)) == pytest.approx(asdict(bytes_alone))
    # A checkpoint is one of few files: its bytes alone count.
    assert files_alone.restart(START, restored_bytes=1e8).resume == 0


def test_what_is_on_its_way_comes_before_what_is_asked_for() -> None:
    assert sync(in_flight_bytes=2e7).restart(START).sync == pytest.approx(0.95 * 120)
    assert sync(in_flight_bytes=2e9).restart(START).sync == pytest.approx(950)


def test_a_stage_that_reads_everything_waits_for_what_is_left_and_never_again() -> None:
    first = sync(first_bytes=1e9).restart(START)
    assert (first.sync, first.data_wait) == (pytest.approx(950), 0)


def test_a_program_waits_for_all_of_it_before_it_starts() -> None:
    found = sync(first_bytes=1e9, is_of_program=True).restart(START, restored_bytes=2e7)
    assert (found.sync, found.resume, found.data_wait) == (pytest.approx(1000), 20, 0)


def test_what_is_restored_comes_over_the_same_line() -> None:
    alone = sync(first_bytes=1e9).restart(START)
    both = sync(first_bytes=1e9).restart(START, restored_bytes=2e7)
    # The line is busy from the sync's start to its end in any case.
    assert both.to_training == pytest.approx(alone.to_training + 20)


def test_a_line_as_fast_as_the_steps_costs_no_more_than_the_first_files() -> None:
    assert sync(epoch_seconds=860.0).restart(START).data_wait == 0
    assert sync(epoch_seconds=860.0).restart(START, passed=ANYWHERE).data_wait == 0
    assert sync(epoch_seconds=400.0).restart(START).data_wait == pytest.approx(855 - 400)


@pytest.mark.parametrize("passed", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("epoch", [50, 300, 700, 1100])
def test_the_steps_wait_as_long_as_when_each_file_is_played(epoch: float, passed: float) -> None:
    asked = sync(first_bytes=0.0, epoch_seconds=epoch)
    found = asked.restart(START.replaced({"first_step_seconds": 0}), passed=[passed])
    assert found.sync == 0
    # Of 1,000 s of the sync.
    assert found.data_wait == pytest.approx(played(epoch, passed), abs=20)


def test_a_replacement_is_planned_anywhere_in_an_epoch() -> None:
    waits = [sync().restart(START, passed=[each]).data_wait for each in ANYWHERE]
    assert sync().restart(START, passed=ANYWHERE).data_wait == pytest.approx(fmean(waits))


@given(
    rates=st.tuples(st.floats(0.01, 2000), st.floats(0.01, 2000)),
    burst_seconds=st.floats(0, 4000),
    num_bytes=st.floats(1, 1e12),
)
def test_bytes_and_seconds_are_each_others_inverse(
    rates: tuple[float, float], burst_seconds: float, num_bytes: float
) -> None:
    rate = Rate(baseline=min(rates), burst=max(rates), burst_seconds=burst_seconds)
    assert rate.bytes_by(rate.seconds(num_bytes)) == pytest.approx(num_bytes, rel=1e-6)


@given(
    num_bytes=st.floats(0, 1e12),
    share=st.floats(0, 1),
    epoch=st.floats(0.001, 1e5),
    restored=st.floats(0, 1e11),
    first_step=st.floats(0, 1000),
)
def test_a_restart_waits_at_most_as_long_as_the_sync_takes_and_no_part_is_negative(
    num_bytes: float, share: float, epoch: float, restored: float, first_step: float
) -> None:
    asked = sync(num_bytes=num_bytes, first_bytes=share * num_bytes, epoch_seconds=epoch)
    constants = START.replaced({"first_step_seconds": first_step})
    found: Restart = asked.restart(constants, restored_bytes=restored, passed=ANYWHERE)
    assert min(found.sync, found.resume, found.data_wait) >= 0
    assert found.sync + found.data_wait <= asked.seconds(num_bytes) * (1 + 1e-9) + 1e-6


def test_unknown_rates_and_no_data_cost_nothing() -> None:
    for found in (sync(network=UNKNOWN), sync(num_bytes=0.0, first_bytes=0.0)):
        assert found.restart(START).seconds == 10 + 4 + 50


def test_a_burst_lasts_as_long_as_its_credits() -> None:
    rate = Rate(baseline=87.5, burst=437.5, burst_seconds=1800)
    assert rate.seconds(437.5e6 * 1800) == pytest.approx(1800)
    assert rate.seconds(437.5e6 * 1800 + 87.5e6) == pytest.approx(1801)


def test_imagenet_reaches_the_volume_as_fast_as_gp3_takes_it() -> None:
    instance, constants = catalogue.find("g5.xlarge"), Constants()
    found = sync(
        volume=volume_rate(instance, 131.072, constants), network=network_rate(instance, constants)
    )
    assert found.seconds(150e9) == pytest.approx(150e3 / 131.072)
    # 300 GB: 30 minutes at 125 MiB/s while credits last, the rest at 87.5 MB/s.
    rest = (300e3 - 131.072 * 1800) / 87.5
    assert found.seconds(300e9) == pytest.approx(1800 + rest)
