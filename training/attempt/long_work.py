"""Work that may delay the next step boundary for long, by measurement or by its kind.

Before such work a copy of the boundary's state is staged, so that it can be saved if a notice comes
meanwhile; and the watchdog does not mistake it for a hang.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Literal, TypeAlias

from training.attempt.watchdog import Watchdog

Work: TypeAlias = Literal["step", "first step", "compilation", "evaluation", "shard", "model"]

# Assumed before anything was measured in this process. A ResNet-18 took 33 s to compile on 2 cores;
# the end of an evaluation (COCO's matching, pictures) depends on the workload.
_UNMEASURED_SECONDS: dict[Work, float] = {
    "step": 0.0,
    "first step": 10.0,
    "compilation": 120.0,
    "evaluation": 60.0,
    "shard": 60.0,
    "model": 60.0,
}
_SHARE_OF_BUDGET = 0.25
# One slow step is remembered for a few hundred steps, not for the rest of the run.
_FORGETTING = 0.99
# Work that takes a few times longer than ever before is not a hang.
_PATIENCE = 20.0


class LongWork:
    """Remembers how long each kind of work took, weighted towards the longest time."""

    def __init__(self, budget_seconds: float, watchdog: Watchdog) -> None:
        self._budget_seconds = budget_seconds
        self._watchdog = watchdog
        self._measured: dict[Work, float] = {}

    def expected_seconds(self, work: Work) -> float:
        """Expected duration: measured here, or else assumed."""
        if work in self._measured:
            return self._measured[work]
        if work == "first step":
            return max(_UNMEASURED_SECONDS[work], 10 * self._measured.get("step", 0.0))
        return _UNMEASURED_SECONDS[work]

    def measured_seconds(self, work: Work) -> float | None:
        """Duration as measured here, weighted towards the longest; None if never measured."""
        return self._measured.get(work)

    def is_long(self, work: Work) -> bool:
        """Whether a notice during this work might leave too little time after it."""
        return self.expected_seconds(work) > _SHARE_OF_BUDGET * self._budget_seconds

    @contextlib.contextmanager
    def doing(self, work: Work) -> Iterator[None]:
        """Measure the work, and allow for it in the watchdog."""
        began = time.monotonic()
        with self._watchdog.allowing(_PATIENCE * self.expected_seconds(work)):
            yield
        # First steps and compilations take arbitrarily long: earlier ones predict nothing.
        if work not in ("first step", "compilation"):
            before = _FORGETTING * self._measured.get(work, 0.0)
            self._measured[work] = max(time.monotonic() - began, before)
