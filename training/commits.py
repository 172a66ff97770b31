"""What the loop asks of the saver at its step boundaries. Rank 0 alone has a saver.

A capture is asked for only where it is used: it reads the numbers of the last step first.
"""

from collections.abc import Callable

from training.capture import Capture
from training.long_work import Work
from training.position import Attempt, Position
from training.saver import Saver


class Commits:
    """The commits of one stage."""

    def __init__(
        self,
        attempt: Attempt,
        saver: Saver | None,
        steps_per_epoch: int,
        capture: Callable[[], Capture],
    ) -> None:
        self._attempt = attempt
        self._saver = saver
        self._steps_per_epoch = steps_per_epoch
        self._capture = capture

    def if_due(self, position: Position) -> bool:
        """A periodic or recommended commit; whether there was one."""
        saver = self._saver
        if saver is None:
            return False
        saver.poll()
        if self._attempt.interruption.take_rebalance():
            saver.commit(self._capture(), position, self._epoch(position), "rebalance")
        elif saver.is_due(position, self._steps_per_epoch):
            saver.begin(self._capture(), position, self._epoch(position))
        else:
            return False
        return True

    def before(self, work: Work, position: Position) -> None:
        """Have a copy at hand if a notice could come in long work: staged, or else committed."""
        saver = self._saver
        if saver is None or not self._attempt.oversight.long_work.is_long(work):
            return
        if saver.holds(position):
            return
        epoch, capture = self._epoch(position), self._capture()
        if not saver.stage(capture, position, epoch):
            saver.commit(capture, position, epoch, "periodic")

    def at_the_end(self, position: Position) -> None:
        """The stage is done: what comes next begins from what is read back from this commit."""
        if self._saver is not None:
            self._saver.commit(self._capture(), position, self._epoch(position), "stage-end")

    def at_a_notice(self, position: Position) -> None:
        """Save and release, as far as the time allows."""
        if self._saver is not None:
            notice = self._attempt.interruption.notice
            assert notice is not None
            self._saver.emergency(self._capture(), position, self._epoch(position), notice)

    def _epoch(self, position: Position) -> int:
        return position.stage_step // self._steps_per_epoch
