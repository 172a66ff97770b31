"""The watchdog of a trainer in a process whose stderr is not a file, as in a notebook."""

import itertools
import threading

import pytest

from training.interruption.watchdog import Watchdog


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
