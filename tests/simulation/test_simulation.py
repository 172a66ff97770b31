"""What once broke a promise keeps it now, and the simulation is the same each time."""

import logging
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.simulation.clock import CLOCK, Event, Lock, PoweredOffError, Process, sleep
from tests.simulation.faults import FAULTS
from tests.simulation.kept import KEPT
from tests.simulation.life import live_through, simulated
from tests.simulation.plan import draw
from tests.simulation.shortcuts import quick_asdict
from tests.simulation.story import shrink


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with simulated():
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_life_keeps_every_promise_and_shows_its_faults(name: str) -> None:
    plan, faults = KEPT[name]
    assert live_through(plan).broken == ()
    for each in faults:
        with FAULTS[each].plant():
            found = live_through(plan, until_broken=True)
        assert FAULTS[each].is_found(found.broken), f"{each}: {found.story}"


def test_a_seed_is_one_life_and_the_shortcuts_change_nothing() -> None:
    first, again = live_through(draw(9)), live_through(draw(9))
    assert first.story == again.story
    in_full = live_through(draw(9), sees_all=True)
    assert [text for _, text in in_full.story] == [text for _, text in first.story]
    assert quick_asdict(draw(9)) == asdict(draw(9))


def test_threads_meet_at_events_and_locks_in_virtual_time() -> None:
    CLOCK.restart(0.0)
    process, told, lock, event = Process(name="one"), list[tuple[float, str]](), Lock(), Event()

    def hold() -> None:
        with lock:
            sleep(5)
            event.set()

    def wait() -> None:
        is_set = event.wait(2)
        told.append((CLOCK.now, f"event {is_set}"))
        with lock:
            told.append((CLOCK.now, "lock"))

    def end() -> None:
        try:
            sleep(100)
        except PoweredOffError:
            told.append((CLOCK.now, "powered off"))

    for act in (hold, wait, end):
        CLOCK.start(process, act)
    CLOCK.start(Process(name="two"), process.end, at=7.0)
    CLOCK.run(1000.0)
    assert told == [(2.0, "event False"), (5.0, "lock"), (7.0, "powered off")]


@pytest.mark.slow
def test_many_seeds_keep_every_promise() -> None:
    for seed in range(1, 1001):
        found = live_through(draw(seed))
        assert found.broken == (), shrink(found).plan
