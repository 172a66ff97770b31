"""Decides when the next save is due, and which saves a notice still leaves time for.

A save is due by the interval, at a new best, or sooner after a failed one.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from contract.auto_interval import (
    MAX_EPOCHS,
    IntervalChoice,
    choose_interval,
    expected_life_seconds,
)
from contract.grammar import Interval
from training.durable.record.head import Position
from training.durable.save.publish import Cost, FailedSaves

# The first save under `auto` comes early, to measure what one costs here.
_FIRST_SECONDS = 60.0
# Enough for a median that one slow step does not move.
_PACE_STEPS = 100

# Until something is measured on this machine: below what gp3 and S3 were observed to reach.
_ASSUMED_SAVE_BYTES_PER_SECOND = 1e9
_ASSUMED_UPLOAD_BYTES_PER_SECOND = 50e6

# The key in a checkpoint's JSON for the seconds that the run had trained.
SPENT_SECONDS = "spent_seconds"

_SavePlan: TypeAlias = Literal["save", "finish, then save", "finish", "give up"]


class Schedule:
    """The schedule of one attempt; it records every save that starts, commits or fails."""

    def __init__(
        self,
        interval: Interval,
        best: Mapping[str, float] | None = None,
        *,
        spent_seconds: float = 0.0,
        interruptions: int = 0,
        planned_life_seconds: float = 0.0,
    ) -> None:
        """`spent_seconds` and `interruptions` are those of the attempts before."""
        self._planned_life_seconds = planned_life_seconds
        self.failed = FailedSaves()
        self.pace = _StepPace()
        self.is_overdue = False  # a boundary was left out, as the save before it made no headway
        self._interval = interval
        self._choice: IntervalChoice | None = None  # of `auto`, once a save was measured
        self._epoch_seconds: float | None = None
        self._best = best or {}
        self._saved_step = -1
        self._spent_seconds = spent_seconds
        self._interruptions = interruptions
        self._began = self._last_started = time.monotonic()

    @property
    def spent_seconds(self) -> float:
        """Seconds that the run has trained by now, over all attempts."""
        return self._spent_seconds + time.monotonic() - self._began

    @property
    def since_last(self) -> float:
        """Seconds since the last save started, or this attempt."""
        return time.monotonic() - self._last_started

    def is_due(
        self,
        position: Position,
        steps_per_epoch: int,
        *,
        is_saving: bool,
        epoch_seconds: float | None = None,
    ) -> bool:
        """Whether this boundary is to be saved.

        An interval of steps or epochs is exact, even if training must wait for a save under way.
        One of seconds, or `auto`, moves to the first boundary after that save.
        """
        self._epoch_seconds = epoch_seconds
        if position.is_best and position.best != self._best:
            return True
        if position.step == self._saved_step:
            return False
        if (self.failed.is_retry_due or self.is_overdue) and not is_saving:
            return True
        interval = self._interval
        if interval.unit in ("s", "auto"):
            return not is_saving and self.since_last >= self._seconds
        if interval.unit == "steps":
            return position.step % interval.value == 0
        epochs, rest = divmod(position.stage_step, steps_per_epoch)
        return rest == 0 and epochs % interval.value == 0

    def start_due(self, position: Position) -> None:
        """Record that a save that was due starts."""
        self._best, self._saved_step, self.is_overdue = position.best, position.step, False
        self.start_other()

    def start_other(self) -> None:
        """Record that a save for another reason starts; the next interval counts from it too."""
        self._last_started = time.monotonic()

    def measure(self, cost_seconds: float, durable_seconds: float) -> IntervalChoice | None:
        """Record what a committed save cost; return the choice of `auto` if it moved by a quarter.

        The choice is made again after every save, from what that one cost.
        """
        self.failed.clear()
        if self._interval.unit != "auto":
            return None
        before = self._choice
        self._choice = choose_interval(
            cost_seconds=cost_seconds,
            durable_seconds=durable_seconds,
            life_seconds=expected_life_seconds(
                spent_seconds=self.spent_seconds,
                interruptions=self._interruptions,
                planned_seconds=self._planned_life_seconds,
            ),
            epoch_seconds=self._epoch_seconds,
        )
        is_same = before is not None and 0.8 < self._choice.seconds / before.seconds < 1.25
        return None if is_same else self._choice

    @property
    def _seconds(self) -> float:
        """Seconds between two saves; with `auto` the first one comes early."""
        if self._interval.unit == "s":
            return self._interval.value
        if self._choice is not None:
            return self._choice.seconds
        return min(_FIRST_SECONDS, MAX_EPOCHS * (self._epoch_seconds or math.inf))


class _StepPace:
    """How long steps take while a save is under way, and while none is."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=_PACE_STEPS)
        self._during: deque[float] = deque(maxlen=_PACE_STEPS)
        self._num_during = 0
        self._before: tuple[Position, bool, float] | None = None

    def end_step(self, position: Position) -> None:
        """Record that training has reached this boundary."""
        if self._before is None:
            return
        (before, is_saving, since), self._before = self._before, None
        if before.stage != position.stage:
            self._alone.clear()
        elif before.step + 1 == position.step:  # else it was an evaluation
            (self._during if is_saving else self._alone).append(time.monotonic() - since)
            self._num_during += is_saving

    def begin_step(self, position: Position, *, is_saving: bool) -> None:
        """Record that training goes on from this boundary."""
        self._before = position, is_saving, time.monotonic()

    def take_lost_seconds(self, most: float) -> float:
        """Return how much longer the steps during the last save took, `most` at most."""
        during, count = list(self._during), self._num_during
        self._during.clear()
        self._num_during = 0
        if not during or not self._alone:
            return most
        longer = statistics.median(during) - statistics.median(self._alone)
        return min(most, max(0.0, count * longer))


def estimate(size: int, last: Cost | None) -> Cost:
    """Estimate the cost of a save of `size` bytes from that of the last one."""
    if last is None:
        return Cost(
            bytes=size,
            save_seconds=size / _ASSUMED_SAVE_BYTES_PER_SECOND,
            upload_seconds=size / _ASSUMED_UPLOAD_BYTES_PER_SECOND,
            is_measured=False,
        )
    # Cost is proportional to size; a tiny state is all latency, which is measured as such.
    scale = size / max(last.bytes, 1)
    return Cost(
        bytes=size,
        save_seconds=last.save_seconds * scale,
        upload_seconds=last.upload_seconds * scale,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveBudget:
    """The decision at a notice, with everything it is based on."""

    cost: Cost  # expected of this boundary's save
    step_seconds: float  # from the notice to the boundary
    reserve_seconds: float  # that no save may use
    seconds_left: float
    finish_seconds: float | None  # what a save in progress still needs

    @property
    def need_seconds(self) -> float:
        """Seconds that a save of this boundary needs."""
        return self.cost.seconds + self.reserve_seconds

    @property
    def plan(self) -> _SavePlan:
        """Save this boundary if it fits; otherwise finish the save in progress if that fits.

        If both fit into half the time, the save in progress is finished first, as free insurance.
        An estimate from assumed rates refuses nothing before the reserve: trying is free, too.
        """
        left = self.seconds_left
        if left <= self.reserve_seconds:
            return "give up"
        finish = self.finish_seconds
        if finish is not None and finish + self.need_seconds <= left / 2:
            return "finish, then save"
        if self.need_seconds <= left or not self.cost.is_measured:
            return "save"
        if finish is not None and finish + self.reserve_seconds <= left:
            return "finish"
        return "give up"

    def __str__(self) -> str:
        in_progress = (
            ""
            if self.finish_seconds is None
            else f"; a save in progress needs {self.finish_seconds:.2f} s more"
        )
        cost = self.cost
        return (
            f"{cost.bytes / 1e6:.1f} MB: {self.step_seconds:.2f} s to the boundary, then "
            f"{cost.save_seconds:.2f} s to save + {cost.upload_seconds:.2f} s to upload "
            f"({'measured' if cost.is_measured else 'assumed'}) + "
            f"{self.reserve_seconds:.1f} s in reserve, {self.seconds_left:.1f} s left{in_progress}"
        )
