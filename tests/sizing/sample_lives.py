"""Lives of Spot machines made up by formula: no public trace is shipped."""

import random

from sizing.spot.interruptions import SpotLife


def poisson_lives(*, seed: int, mean: float, wait: float, total: float) -> list[SpotLife]:
    """Lives and waits drawn from exponentials, up to `total` seconds."""
    luck, now, lives = random.Random(seed), 0.0, []
    while now < total:
        end = min(now + luck.expovariate(1 / mean), total)
        lives.append(SpotLife(start=now, end=end))
        now = end + (luck.expovariate(1 / wait) if wait else 0.0)
    return lives
