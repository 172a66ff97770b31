"""Daly's checkpoint interval, which loses least where nothing warns: a policy to compare with."""

import math

from sizing.spot.pattern import NEVER


def daly_interval(*, checkpoint_seconds: float, rate_per_hour: float) -> float:
    """Return the useful seconds between saves that lose least under Poisson interruptions.

    The exact optimum of Daly (2006): x = interval / MTBF solves (1 - x) exp(x + c) = 1 with
    c = checkpoint / MTBF. For c much below 1 it is Young's sqrt(2 * checkpoint * MTBF).
    """
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
