"""When the next save is due: by the interval, at a new best, or sooner after one that failed."""

import time
from collections.abc import Mapping

from contract.auto_interval import IntervalChoice
from contract.grammar import Interval
from training.checkpoint.failed_saves import FailedSaves
from training.checkpoint.interval import AutoInterval
from training.record.position import Position


class Schedule:
    """Of one attempt; it is told of every save that is begun, committed or refused."""

    def __init__(
        self,
        interval: Interval,
        best: Mapping[str, float],
        *,
        spent_seconds: float,
        interruptions: int,
    ) -> None:
        self.failed = FailedSaves()
        self._interval = interval
        self._auto = AutoInterval(spent_seconds=spent_seconds, interruptions=interruptions)
        self._best = best
        self._begun_step = -1
        self._last_boundary = time.monotonic()  # of a save that was begun

    @property
    def spent_seconds(self) -> float:
        """That the run has trained by now, over all attempts."""
        return self._auto.spent_seconds

    def is_due(self, position: Position, steps_per_epoch: int, *, is_saving: bool) -> bool:
        """Whether this boundary is to be saved.

        An interval of steps or epochs is kept to the step, also where that waits for a save under
        way. One of seconds, or `auto`, is put off to the first boundary after it.
        """
        if position.best.get("step") == position.step and position.best != self._best:
            return True
        self._auto.reach(position.stage, position.stage_step, steps_per_epoch)
        if position.step == self._begun_step:
            return False
        if self.failed.is_retry_due and not is_saving:
            return True
        interval = self._interval
        if interval.unit in ("s", "auto"):
            if is_saving:
                return False
            since = time.monotonic() - self._last_boundary
            return self._auto.is_due(since) if interval.unit == "auto" else since >= interval.value
        if interval.unit == "steps":
            return position.step % interval.value == 0
        epochs, rest = divmod(position.stage_step, steps_per_epoch)
        return rest == 0 and epochs % interval.value == 0

    def begin(self, position: Position) -> None:
        """A save that was due is begun."""
        self._best, self._begun_step = position.best, position.step
        self.begin_unasked()

    def begin_unasked(self) -> None:
        """A save for another reason is begun; the next interval counts from it too."""
        self._last_boundary = time.monotonic()

    def measure(self, cost_seconds: float, durable_seconds: float) -> IntervalChoice | None:
        """A save was committed at this cost; what `auto` chooses now, where that is news."""
        self.failed.end()
        if self._interval.unit != "auto" or not self._auto.measure(cost_seconds, durable_seconds):
            return None
        return self._auto.choice
