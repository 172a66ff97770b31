"""How long steps take, and the share of it spent waiting for data."""

import time
from typing import NamedTuple


class StepTime(NamedTuple):
    """How long a step took, and the share of that spent waiting for data."""

    seconds: float
    waited_share: float


class Pace:
    """Measures each step of a stage."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._waited = 0.0
        self._last_seconds = 0.0
        self._first_ended: float | None = None  # its compilation is not the pace
        self._num_steps = 0  # after the first
        self.longest_seconds: float | None = None  # of recent steps, waiting for data included

    def next(self, wait_seconds: float) -> StepTime:
        """The time of the step that has just ended, given the loader's total wait."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        share = min(1.0, (wait_seconds - self._waited) / seconds)
        self._since, self._waited, self._last_seconds = now, wait_seconds, seconds
        if self._first_ended is None:
            self._first_ended = now
        else:
            self._num_steps += 1
        return StepTime(seconds, share)

    def seconds_for(self, num_steps: int) -> float | None:
        """How long so many more steps will take here, with evaluations and commits as so far."""
        if self._first_ended is None or not self._num_steps:
            return None
        return (time.monotonic() - self._first_ended) / self._num_steps * num_steps

    def remember(self) -> None:
        """Count the step that has just ended as typical; slow ones are forgotten slowly."""
        self.longest_seconds = max(self._last_seconds, 0.99 * (self.longest_seconds or 0.0))

    def skip(self) -> None:
        """Leave out what happened since: an evaluation or a commit is not a step."""
        self._since = time.monotonic()
