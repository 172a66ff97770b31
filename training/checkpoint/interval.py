"""The `auto` checkpoint interval, which balances the cost of saves and of interruptions.

It weighs what a save costs here against what an interruption would lose without it, from the run's
own measurements. The choice and its reason are logged and in the metrics.
"""

import math
import time
from dataclasses import dataclass

# At most two epochs between two saves,
_MOST_EPOCHS = 2
# unless saving that often would take more than this share of the time.
_MOST_SAVING_SHARE = 0.02
# The expectation before a run has its own history: the mean life of the 204 one-instance V100
# Spot machines of 2023 in the preemption traces of skypilot-org/spot-traces (NSDI'24).
MEAN_LIFE_SECONDS = 2.1 * 3600
# Saving more often gains less than half of this per interruption, and each save also writes an
# event, a metrics line and the head.
_LEAST_SECONDS = 60.0
# The first save comes early, to measure what one costs here.
_FIRST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalChoice:
    """Seconds between two saves, and what they are based on."""

    seconds: float
    cost_seconds: float  # of training time per save
    durable_seconds: float  # from a boundary to its commit
    life_seconds: float  # between two interruptions
    why: str

    def __str__(self) -> str:
        return (
            f"every {self.seconds:.1f} s: {self.why} (a save costs {self.cost_seconds:.3f} s of "
            f"training and is durable after {self.durable_seconds:.2f} s; "
            f"{self.life_seconds / 3600:.1f} h between interruptions)"
        )


def choose(
    *,
    cost_seconds: float,
    durable_seconds: float,
    life_seconds: float,
    epoch_seconds: float | None,
) -> IntervalChoice:
    """The interval with the least expected cost, within the bounds.

    Young (1974), refined by Daly (2006) for costs near the mean life: saves cost cost / interval,
    each interruption loses half an interval; the sum is minimal at sqrt(2 cost life). The delay
    until a save is durable adds the same loss to each interruption, whatever the interval.
    """
    seconds, why = math.sqrt(2 * cost_seconds * life_seconds), "Young/Daly"
    if seconds < _LEAST_SECONDS:
        seconds, why = _LEAST_SECONDS, "saving more often gains next to nothing"
    if epoch_seconds is not None and seconds > _MOST_EPOCHS * epoch_seconds:
        seconds, why = _MOST_EPOCHS * epoch_seconds, f"{_MOST_EPOCHS} epochs, the maximum"
    if seconds < cost_seconds / _MOST_SAVING_SHARE:
        seconds = cost_seconds / _MOST_SAVING_SHARE
        why = f"saving may take at most {_MOST_SAVING_SHARE:.0%} of the time"
    if seconds < durable_seconds:
        seconds, why = durable_seconds, "one save is in progress at a time"
    return IntervalChoice(
        seconds=seconds,
        cost_seconds=cost_seconds,
        durable_seconds=durable_seconds,
        life_seconds=life_seconds,
        why=why,
    )


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
        """Expected seconds between two interruptions.

        The traces' mean counts as one observed life, so an early interruption or a long quiet start
        moves the estimate without dominating it.
        """
        return (MEAN_LIFE_SECONDS + self.spent_seconds) / (1 + self._interruptions)

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
        self.choice = choose(
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
        return seconds >= min(_FIRST_SECONDS, _MOST_EPOCHS * (self._epoch_seconds or math.inf))
