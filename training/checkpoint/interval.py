"""The `auto` checkpoint interval, which balances the cost of saves and of interruptions.

It weighs what a save costs here against what an interruption would lose without it, from the run's
own measurements. The choice and its reason are logged and in the metrics.
"""

import math
import time

from contract.auto_interval import (
    MAX_EPOCHS,
    IntervalChoice,
    choose_interval,
    expected_life_seconds,
)

# The first save comes early, to measure what one costs here.
_FIRST_SECONDS = 60.0


class AutoInterval:
    """Chooses the interval again after every save, from what that save cost."""

    def __init__(self, *, spent_seconds: float, interruptions: int) -> None:
        self.choice: IntervalChoice | None = None
        self._spent_seconds = spent_seconds  # by earlier attempts
        self._interruptions = interruptions
        self._began = time.monotonic()
        self._stage: tuple[str, int, float] | None = None  # name, first step, when
        self._epoch_seconds: float | None = None

    @property
    def spent_seconds(self) -> float:
        """Seconds that the run has trained so far, over all attempts."""
        return self._spent_seconds + time.monotonic() - self._began

    @property
    def life_seconds(self) -> float:
        """Expected time between two interruptions."""
        return expected_life_seconds(
            spent_seconds=self.spent_seconds, interruptions=self._interruptions
        )

    def reach(self, stage: str, step: int, steps_per_epoch: int) -> None:
        """Measure the speed; called at every step boundary."""
        now = time.monotonic()
        if self._stage is None or self._stage[0] != stage:
            self._stage, self._epoch_seconds = (stage, step, now), None
        elif step > self._stage[1]:
            pace = (now - self._stage[2]) / (step - self._stage[1])
            self._epoch_seconds = pace * steps_per_epoch

    def measure(self, cost_seconds: float, durable_seconds: float) -> bool:
        """Choose from a save's cost; return whether the choice changed by a quarter or more."""
        before = self.choice
        self.choice = choose_interval(
            cost_seconds=cost_seconds,
            durable_seconds=durable_seconds,
            life_seconds=self.life_seconds,
            epoch_seconds=self._epoch_seconds,
        )
        return before is None or not 0.8 < self.choice.seconds / before.seconds < 1.25

    def is_due(self, seconds: float) -> bool:
        """Whether to save `seconds` after the last save; the first one comes early, to measure."""
        if self.choice is not None:
            return seconds >= self.choice.seconds
        return seconds >= min(_FIRST_SECONDS, MAX_EPOCHS * (self._epoch_seconds or math.inf))
