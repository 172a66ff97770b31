"""The watchdog of a trainer in a process whose stderr is not a file, as in a notebook."""

import itertools
import threading
import time

import pytest

from training.attempt.supervisor import Watchdog


def test_it_watches_on_where_stderr_has_no_file_descriptor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched_on, looks = threading.Event(), itertools.count(1)

    def excuse() -> bool:
        if next(looks) == 3:
            watched_on.set()
        return True

    watchdog = Watchdog(0.01, when_hung=lambda why: pytest.fail(why))
    watchdog.excuse = excuse
    watchdog.start()
    assert watched_on.wait(10)
    watchdog.close()


def test_who_was_excused_has_the_whole_limit_once_what_it_waited_for_is_there() -> None:
    looks, hung = list[float](), threading.Event()

    def excuse() -> bool:
        looks.append(time.monotonic())
        return len(looks) == 1

    watchdog = Watchdog(1.0, when_hung=lambda why: hung.set())
    watchdog.excuse = excuse
    watchdog.start()
    assert hung.wait(10)
    watchdog.close()
    assert looks[1] - looks[0] >= 0.9
