"""A machine that gets a dated notice, and a run too long to finish before that date."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.training import hooks, tiny
from tests.training.runs import Run, assert_equal

# Seconds of a notice here, and a run that does not come to its end in them.
NOTICE = 8.0
LONG = ["--override=epochs=25", "--override=second_epochs=2"]


class Clock:
    """A monotonic clock that goes only where it is told to, in all processes forked from here."""

    def __init__(self) -> None:
        self._now = multiprocessing.Value("d", time.monotonic())

    def read(self) -> float:
        return float(self._now.value)

    def advance(self, seconds: float) -> None:
        # Two ranks advance it at once.
        with self._now.get_lock():
            self._now.value += seconds

    def install(self) -> None:
        """Have this process tell the time by it."""
        time.monotonic = self.read


class Machine:
    """A machine that gets a notice where the workload is told to give it.

    By its own clock the workload's work takes no real time, and no busy machine counts.
    """

    def __init__(self, run: Run, notice_file: Path, clock: Clock) -> None:
        self.run = run
        self.clock = clock
        self._noticed_at = multiprocessing.RawValue("d")
        run.at_start = clock.install
        self.notice_file = notice_file
        self.seconds = 0.04  # of each micro-batch, evaluation batch and shard
        self.options = [
            f"--notice-file={notice_file}",
            f"--notice-budget-seconds={NOTICE}",
            "--checkpoint-interval=1000steps",
        ]
        for place in ("shard", "first", "first-evaluation", "second"):
            self.at(place, lambda reached: None)

    def notice(self) -> None:
        """As the interruption handler gives it; called in the attempt's own process."""
        when = datetime.now(UTC) + timedelta(seconds=NOTICE)
        self.notice_file.write_text(json.dumps({"action": "terminate", "time": when.isoformat()}))
        self._noticed_at.value = time.monotonic()
        hooks.send(signal.SIGUSR1)

    def notice_at(
        self, place: str, number: int, then: Mapping[int, Callable[[], object]] = {}
    ) -> None:
        """Give the notice when the workload gets there, and do what comes `then`."""
        acts = {number: self.notice, **then}
        self.at(place, lambda reached: acts.get(reached, lambda: None)())

    def pass_time_until(self, left: float) -> None:
        """Let time pass until so many seconds of the notice are left."""
        self.clock.advance(float(self._noticed_at.value) + NOTICE - left - self.clock.read())

    def at(self, place: str, act: Callable[[int], None]) -> None:
        """Have the workload act there; it takes its time."""

        def slowly(reached: int) -> None:
            self.clock.advance(self.seconds)
            act(reached)

        tiny.HOOKS[place] = slowly

    def attempt(self, *more: str, ranks: int = 1) -> float:
        """Run until the attempt ends in the notice; seconds that were left of it then."""
        if ranks > 1:
            assert self.run.attempt_with_ranks(ranks, *self.options, *more) == [75] * ranks
        else:
            assert self.run.attempt_in_fork(*self.options, *more) == 75
        return self.end()

    def end(self) -> float:
        """The machine is gone: later attempts are another's; seconds that were left of a notice."""
        left = float(self._noticed_at.value) + NOTICE - self.clock.read()
        self.notice_file.unlink()
        tiny.HOOKS.clear()
        self.run.at_start = None
        assert self.run.head.state == "released"
        assert left > 0, "the machine was gone before"
        return left

    def trains_on_when_one_of_two_is_told(self, rank: int) -> None:
        """The notice comes to one rank; both gain steps, and end with the same one."""

        def act(step: int) -> None:
            if step == 8 and os.environ["RANK"] == str(rank):
                self.notice()

        self.at("first", act)
        self.attempt(ranks=2)
        _, last = self.commits
        assert last["gained_steps"] > 2
        assert last["step"] == self.last_step

    @property
    def commits(self) -> list[dict[str, Any]]:
        """At the notice."""
        return [event for event in self.run.events("committed") if event["kind"] == "emergency"]

    @property
    def last_step(self) -> int:
        """That was done before the end."""
        return max(int(line["step"]) for line in self.run.lines("step"))

    def go_on(self, whole: Run, ranks: int = 1) -> None:
        """The replacement goes to the end; the result is that of the uninterrupted run."""
        if ranks > 1:
            assert self.run.attempt_with_ranks(ranks) == [0] * ranks
        else:
            assert self.run.attempt() == 0
        assert_equal(self.run, whole)
