"""Time inside a part belongs to the innermost part alone; threads add up; taking begins anew."""

import threading
import time

import pytest

from training.durable import tally
from training.durable.tally import Tally


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves when it is told to."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    Tally.taken()
    return now


def test_time_belongs_to_the_innermost_part(clock: list[float]) -> None:
    with Tally.timed("make"):
        clock[0] += 1
        with Tally.timed("read"):
            clock[0] += 2
            with Tally.timed("sync"):
                clock[0] += 4
            clock[0] += 8
        with Tally.timed("decode"):
            clock[0] += 16
        clock[0] += 32
    assert Tally.taken().seconds == {"sync": 4, "read": 10, "decode": 16, "make": 33}
    assert Tally.taken() == Tally()


def test_what_fails_took_its_time_too(clock: list[float]) -> None:
    with Tally.timed("make"), pytest.raises(ValueError, match="no image"), Tally.timed("decode"):
        clock[0] += 3
        raise ValueError("no image")
    assert Tally.taken().seconds == {"decode": 3, "make": 0}


def test_threads_add_up(clock: list[float]) -> None:
    both = threading.Barrier(2)

    def act() -> None:
        with Tally.timed("decode"):
            both.wait(60)
            with tally._lock:
                clock[0] += 5
            both.wait(60)
        Tally.count("replaced", 2)

    threads = [threading.Thread(target=act) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Tally.taken() == Tally({"decode": 20}, {"replaced": 4})


def test_tallies_add_up() -> None:
    sums = Tally({"read": 1.0}, {"replaced": 1})
    sums.add(Tally({"read": 2.0, "decode": 4.0}, {"replaced": 1, "resized": 3}))
    assert sums == Tally({"read": 3.0, "decode": 4.0}, {"replaced": 2, "resized": 3})
