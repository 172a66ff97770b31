"""The checkpoint interval that the trainer chooses itself (`auto`) and that the plan predicts.

It weighs the cost of a save against what an interruption without one would lose.
"""

import math
from dataclasses import dataclass

from contract.notice import MAX_SECONDS

# At most two epochs pass between two saves,
MAX_EPOCHS = 2
# unless saving that often would take more than this share of the time. A save that no notice leaves
# time for must come more often: its interval would be longer than a machine lives.
MAX_SAVING_SHARE = 0.02
# Saving more often gains less than half of this per interruption, and each save also writes an
# event, a metrics line and the head.
MIN_SECONDS = 60.0
# The expectation until a run has a history of its own: the mean life of the 204 one-instance V100
# Spot machines of 2023 in the preemption traces of skypilot-org/spot-traces (NSDI'24).
MEAN_LIFE_SECONDS = 2.1 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalChoice:
    """Seconds between two saves, and the figures behind them."""

    seconds: float
    cost_seconds: float  # training time that one save costs: waiting, and slower steps
    durable_seconds: float  # from a boundary to its commit
    life_seconds: float  # between two interruptions
    why: str

    def __str__(self) -> str:
        return (
            f"every {self.seconds:.1f} s: {self.why} (a save costs {self.cost_seconds:.3f} s of "
            f"training and is durable after {self.durable_seconds:.2f} s; "
            f"{self.life_seconds / 3600:.1f} h between interruptions)"
        )


def choose_interval(
    *, cost_seconds: float, durable_seconds: float, life_seconds: float, epoch_seconds: float | None
) -> IntervalChoice:
    """Return the interval that costs least, within the bounds.

    Young (1974), refined by Daly (2006) for costs near the mean life: saves cost cost / interval,
    interruptions half an interval each; the sum is smallest at sqrt(2 cost life). The delay until a
    save is durable adds the same loss to each interruption, whatever the interval. Every
    interruption counts as if no notice came.
    """
    seconds, why = math.sqrt(2 * cost_seconds * life_seconds), "Young/Daly"
    if seconds < MIN_SECONDS:
        seconds, why = MIN_SECONDS, "saving more often gains next to nothing"
    if epoch_seconds is not None and seconds > MAX_EPOCHS * epoch_seconds:
        seconds, why = MAX_EPOCHS * epoch_seconds, f"at most {MAX_EPOCHS} epochs"
    if durable_seconds < MAX_SECONDS and seconds < cost_seconds / MAX_SAVING_SHARE:
        seconds = cost_seconds / MAX_SAVING_SHARE
        why = f"saving may take at most {MAX_SAVING_SHARE:.0%} of the time"
    if seconds < durable_seconds:
        seconds, why = durable_seconds, "only one save runs at a time"
    return IntervalChoice(
        seconds=seconds,
        cost_seconds=cost_seconds,
        durable_seconds=durable_seconds,
        life_seconds=life_seconds,
        why=why,
    )


def expected_life_seconds(
    *, spent_seconds: float, interruptions: int, planned_seconds: float = 0.0
) -> float:
    """Return the expected time between two interruptions of a run with this history.

    The traces' mean, or what the account's own runs make it longer to, counts as one interruption
    already seen, so an early loss or a long quiet start moves the estimate, but does not rule it.
    """
    return (max(MEAN_LIFE_SECONDS, planned_seconds) + spent_seconds) / (1 + interruptions)
