"""The checkpoint interval that loses least: Young/Daly, and how a notice changes it.

Without a notice an interruption loses half an interval on average. With a notice long enough to
save in, it loses only the notice, whatever the interval: only those without one count.
"""

import math
from dataclasses import dataclass

from contract.auto_interval import MAX_EPOCHS, MAX_SAVING_SHARE, MIN_SECONDS

# AWS: notices are "best effort". No figure is published; one in twenty missing is our assumption.
NOTICE_ARRIVES = 0.95
# Less often than this, in interruptions per hour, is never.
NEVER = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendedInterval:
    """Useful seconds between two saves, and the rule that set them."""

    seconds: float
    why: str


def daly_interval(*, checkpoint_seconds: float, rate_per_hour: float) -> float:
    """Return the useful seconds between saves that lose least under Poisson interruptions.

    The exact optimum of Daly (2006): x = interval / MTBF solves (1 - x) exp(x + c) = 1 with
    c = checkpoint / MTBF. For c much below 1 it is Young's sqrt(2 * checkpoint * MTBF).
    """
    _check(checkpoint_seconds=checkpoint_seconds, rate_per_hour=rate_per_hour)
    if rate_per_hour < NEVER:
        return math.inf
    mean = 3600 / rate_per_hour
    c = checkpoint_seconds / mean
    x = min(math.sqrt(2 * c), 0.999)
    for _ in range(50):
        # Newton on log(1 - x) + x + c = 0, kept inside (0, 1).
        step = (math.log1p(-x) + x + c) * (1 - x) / x if x > 0 else 0.0
        x = min(max(x + step, x / 2), (1 + x) / 2)
        if abs(step) <= 1e-12 * x:
            break
    return x * mean


def recommend_interval(
    *,
    checkpoint_seconds: float,
    rate_per_hour: float,
    notice_fits: bool,
    notice_arrives: float = NOTICE_ARRIVES,
    epoch_seconds: float | None = None,
) -> RecommendedInterval:
    """Return the interval to set; `checkpoint_seconds` is what one save keeps the GPU waiting.

    At most two epochs are left unsaved, unless they are so short that saving them would take more
    than 2 % of the time.
    """
    _check(checkpoint_seconds=checkpoint_seconds, rate_per_hour=rate_per_hour)
    if not 0 <= notice_arrives <= 1:
        raise ValueError(f"notice_arrives is a share between 0 and 1, got {notice_arrives}")
    unsaved = 1 - notice_arrives if notice_fits else 1.0
    seconds = daly_interval(
        checkpoint_seconds=checkpoint_seconds, rate_per_hour=rate_per_hour * unsaved
    )
    why = (
        f"Young/Daly over the {unsaved:.0%} of interruptions that no notice saves"
        if notice_fits
        else "Young/Daly over every interruption: the save does not fit the notice"
    )
    if epoch_seconds is not None:
        # Short epochs must not make a run save all the time.
        bound = max(MAX_EPOCHS * epoch_seconds, checkpoint_seconds * (1 / MAX_SAVING_SHARE - 1))
        if seconds > bound:
            seconds = bound
            why = f"{MAX_EPOCHS} epochs, or as many as keep saving under {MAX_SAVING_SHARE:.0%}"
    if seconds < MIN_SECONDS:
        seconds, why = MIN_SECONDS, "saves cost so little that once a minute is often enough"
    return RecommendedInterval(seconds=seconds, why=why)


def _check(**values: float) -> None:
    """Refuse a value that cannot be a duration or a rate."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
