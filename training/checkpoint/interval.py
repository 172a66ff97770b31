"""How often to save: every so many epochs, steps or seconds, or as often as pays (`auto`).

`auto` weighs what a save costs here against what an interruption without one would lose, from the
run's own measurements. What it chose, and why, is printed and in the metrics.
"""

import math
import time
from dataclasses import dataclass

# Two epochs at most stand between two saves,
_MOST_EPOCHS = 2
# unless saving so often would take more than this share of the time.
_MOST_SAVING_SHARE = 0.02
# What is expected before a run has a history of its own: the mean life of the 204 one-instance V100
# Spot machines of 2023 in the preemption traces of skypilot-org/spot-traces (NSDI'24).
MEAN_LIFE_SECONDS = 2.1 * 3600
# More often gains less than half of this for each interruption, and each save also writes an event,
# a metrics line and the head.
_LEAST_SECONDS = 60.0
# The first save comes early, to measure what one costs here.
_FIRST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalChoice:
    """Seconds between two saves, and what they rest on."""

    seconds: float
    cost_seconds: float  # that one save takes from training
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
    """The interval that costs least, within the bounds.

    Young (1974), of which Daly (2006) is the refinement for costs near the mean life: saves cost
    cost / interval, interruptions half an interval each; the sum is least at sqrt(2 cost life).
    That a save is durable late adds the same loss to each interruption, whatever the interval.
    """
    seconds, why = math.sqrt(2 * cost_seconds * life_seconds), "Young/Daly"
    if seconds < _LEAST_SECONDS:
        seconds, why = _LEAST_SECONDS, "more often gains next to nothing"
    if epoch_seconds is not None and seconds > _MOST_EPOCHS * epoch_seconds:
        seconds, why = _MOST_EPOCHS * epoch_seconds, f"{_MOST_EPOCHS} epochs, the most"
    if seconds < cost_seconds / _MOST_SAVING_SHARE:
        seconds = cost_seconds / _MOST_SAVING_SHARE
        why = f"saving may take {_MOST_SAVING_SHARE:.0%} of the time at most"
    if seconds < durable_seconds:
        seconds, why = durable_seconds, "one save is under way at a time"
    return IntervalChoice(
        seconds=seconds,
        cost_seconds=cost_seconds,
        durable_seconds=durable_seconds,
        life_seconds=life_seconds,
        why=why,
    )


class AutoInterval:
    """Chooses anew after every save, from what that one cost."""

    def __init__(self, *, spent_seconds: float, interruptions: int) -> None:
        self.choice: IntervalChoice | None = None
        self._spent_seconds = spent_seconds  # by the attempts before
        self._interruptions = interruptions
        self._began = time.monotonic()
        self._stage: tuple[str, int, float] | None = None  # name, first step, when
        self._epoch_seconds: float | None = None

    @property
    def spent_seconds(self) -> float:
        """That the run has trained by now, over all attempts."""
        return self._spent_seconds + time.monotonic() - self._began

    @property
    def life_seconds(self) -> float:
        """Expected between two interruptions.

        The traces' mean counts as one that was seen already, so one early loss or a long quiet
        start moves the estimate without ruling it.
        """
        return (MEAN_LIFE_SECONDS + self.spent_seconds) / (1 + self._interruptions)

    def reach(self, stage: str, step: int, steps_per_epoch: int) -> None:
        """Measure the pace: called at every step boundary."""
        now = time.monotonic()
        if self._stage is None or self._stage[0] != stage:
            self._stage, self._epoch_seconds = (stage, step, now), None
        elif step > self._stage[1]:
            pace = (now - self._stage[2]) / (step - self._stage[1])
            self._epoch_seconds = pace * steps_per_epoch

    def measure(self, cost_seconds: float, durable_seconds: float) -> bool:
        """Choose from a save's cost; whether the choice differs from the last by a quarter."""
        before = self.choice
        self.choice = choose(
            cost_seconds=cost_seconds,
            durable_seconds=durable_seconds,
            life_seconds=self.life_seconds,
            epoch_seconds=self._epoch_seconds,
        )
        return before is None or not 0.8 < self.choice.seconds / before.seconds < 1.25

    def is_due(self, seconds: float) -> bool:
        """Whether a save pays, so long after the last; without a measurement one is made early."""
        if self.choice is not None:
            return seconds >= self.choice.seconds
        return seconds >= min(_FIRST_SECONDS, _MOST_EPOCHS * (self._epoch_seconds or math.inf))
