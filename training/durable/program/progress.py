"""A program's reports as lines of the run's metrics, and the current cost of a loss."""

import math
import time
from collections.abc import Sequence

from contract.program import LOSSES, WORKLOAD
from training.durable.program.event_file import MetricRow
from training.durable.record.metrics import Metrics

_RUNNING_SECONDS = 5.0


class ReportedProgress:
    """The steps, metrics and snapshots of one attempt.

    `step` is the program's own, as its metrics name it; without any, the last snapshot's number.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.step = 0
        self.last: dict[str, float] = {}  # the newest value of each metric
        self.snapshot = 0  # the number of the last one that this attempt has committed
        self.has_steps = False
        self.first_step: int | None = None
        self._metrics = metrics
        self._began = self._stepped = time.monotonic()
        self._safe = self._began  # another machine would have what was done until then
        self._told = self._began
        self._stopped = math.inf  # when the program ended

    def resume(self, step: int, snapshot: str | None) -> None:
        """Begin where the restored snapshot was taken."""
        self.step = step
        self._metrics.write("resume", stage=WORKLOAD, step=step, checkpoint=snapshot)

    def begin(self) -> None:
        """Start the clocks, as the program starts now."""
        self._began = self._stepped = self._safe = self._told = time.monotonic()

    @property
    def unsaved_seconds(self) -> float:
        """What losing the machine costs: the time since the last snapshot's content was written.

        It ends with the program: the seconds it took to exit count, as they may have done work.
        """
        return max(0.0, min(time.monotonic(), self._stopped) - self._safe)

    @property
    def seconds(self) -> float:
        """The time since the program's start."""
        return time.monotonic() - self._began

    def add(self, rows: Sequence[MetricRow]) -> None:
        """Write what the program has reported."""
        by_step: dict[int | None, dict[str, float]] = {}
        for row in rows:
            by_step.setdefault(row.step, {})[row.name] = row.value
        for step, values in by_step.items():
            self.last |= {name: one for name, one in values.items() if math.isfinite(one)}
            if step is not None and (step > self.step or not self.has_steps):
                self._step_on(step, values)
            self._metrics.write("metrics", stage=WORKLOAD, step=self.step, at=step, values=values)

    def committed(self, number: int, age_seconds: float) -> None:
        """Note a safe snapshot, whose content was written `age_seconds` ago."""
        self.snapshot = number
        self._safe = max(self._safe, time.monotonic() - max(0.0, age_seconds))

    def end(self, exit_code: int, unsaved_seconds: float) -> None:
        """Record that the program has ended, and how much of its work is not saved."""
        self._tell("ended", unsaved_seconds, exit_code=exit_code)

    def stopped(self) -> None:
        """Stop the clock of unsaved work: the program has just ended, or must now."""
        self._stopped = time.monotonic()

    def notice(self) -> None:
        """Record that a notice came at this step."""
        self._metrics.write("notice", stage=WORKLOAD, step=self.step)

    def tell(self) -> None:
        """Every few seconds, record what a loss would cost: for the receipt, if it comes."""
        now = time.monotonic()
        if now - self._told >= _RUNNING_SECONDS:
            self._told = now
            self._tell("running", round(self.unsaved_seconds, 2))

    def _tell(self, kind: str, unsaved_seconds: float, **more: object) -> None:
        seconds = {"seconds": round(self.seconds, 2), "unsaved_seconds": unsaved_seconds}
        more |= {"step": self.step, **seconds, "snapshot": self.snapshot}
        self._metrics.write(kind, stage=WORKLOAD, **more)

    def _step_on(self, step: int, values: dict[str, float]) -> None:
        now = time.monotonic()
        self.first_step = step if self.first_step is None else self.first_step
        loss = next((values[name] for name in LOSSES if name in values), None)
        self._metrics.write(
            "step",
            stage=WORKLOAD,
            step=step,
            seconds=round(now - self._stepped, 4),
            **({} if loss is None else {"loss": loss}),
        )
        self.step, self.has_steps, self._stepped = step, True, now
