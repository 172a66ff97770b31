"""What may keep the trainer from its next step boundary for long, by measurement or by kind.

Before such work a copy of the boundary's state is staged, so that a notice in the middle of it can
be answered; and the watchdog takes it for no hang.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Literal, TypeAlias

from training.interruption.watchdog import Watchdog

Work: TypeAlias = Literal["step", "new shape", "compilation", "evaluation", "shard", "model"]

# Before anything was measured in this process. A ResNet-18 took 33 s to compile on two cores; what
# an evaluation does at its end (COCO's matching, pictures) belongs to the workload.
_UNMEASURED_SECONDS: dict[Work, float] = {
    "step": 0.0,
    "new shape": 10.0,
    "compilation": 120.0,
    "evaluation": 60.0,
    "shard": 60.0,
    "model": 60.0,
}
_SHARE_OF_BUDGET = 0.25
# One slow step is remembered for some hundred steps, not for the rest of the run.
_FORGETTING = 0.99
# A hang is something else than work that takes a few times longer than it ever did.
_PATIENCE = 20.0


class LongWork:
    """Remembers how long each kind of work took, rather the longest than the last time."""

    def __init__(self, budget_seconds: float, watchdog: Watchdog) -> None:
        self._budget_seconds = budget_seconds
        self._watchdog = watchdog
        self._measured: dict[Work, float] = {}

    def expected_seconds(self, work: Work) -> float:
        """How long it takes, as far as can be known."""
        if work in self._measured:
            return self._measured[work]
        if work == "new shape":
            return max(_UNMEASURED_SECONDS[work], 10 * self._measured.get("step", 0.0))
        return _UNMEASURED_SECONDS[work]

    def measured_seconds(self, work: Work) -> float | None:
        """How long it took here, rather the longest; None where that was never measured."""
        return self._measured.get(work)

    def is_long(self, work: Work) -> bool:
        """Whether a notice that comes in it could find too little time left after it."""
        return self.expected_seconds(work) > _SHARE_OF_BUDGET * self._budget_seconds

    @contextlib.contextmanager
    def doing(self, work: Work) -> Iterator[None]:
        """Measure, and keep the watchdog quiet."""
        began = time.monotonic()
        with self._watchdog.allowing(_PATIENCE * self.expected_seconds(work)):
            yield
        # New shapes and compilations come unannounced in any length: the last one says nothing.
        if work not in ("new shape", "compilation"):
            before = _FORGETTING * self._measured.get(work, 0.0)
            self._measured[work] = max(time.monotonic() - began, before)
