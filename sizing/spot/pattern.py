"""The pattern of interruptions at a given rate: bursty lives and waits, pools of unknown quality.

Random numbers are drawn once for each pattern, with a fixed seed: the same question has the same
answer.
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

# Samples: how bad the pools are, in equal steps of probability, times random draws in each.
NUM_LEVELS, NUM_LUCKS = 10, 25
# Machines simulated in a row: as few as suffice; longer runs are extrapolated.
MACHINES = (8, 24, 72)

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """How interruptions come, at a given rate.

    life_shape, wait_shape   Weibull shapes: 1 is Poisson, less is many short and a few long
    rate_spread, wait_spread   standard deviation of the logarithm between pools, because the
        quality of a run's pool is unknown
    starts_anywhen   the run starts at any moment, perhaps with no machine available
    """

    life_shape: float
    wait_shape: float
    rate_spread: float
    wait_spread: float
    starts_anywhen: bool


POISSON = Pattern(
    life_shape=1.0, wait_shape=1.0, rate_spread=0.0, wait_spread=0.0, starts_anywhen=False
)
# From the five traces of sizing/spot/interruptions.py: shapes of lives 0.46 to 0.69, of waits 0.45
# to 0.78; standard deviation of the logarithms between zones 0.9 (rate) and 0.7 (wait).
SEEN = Pattern(
    life_shape=0.55, wait_shape=0.6, rate_spread=0.9, wait_spread=0.7, starts_anywhen=True
)


@dataclass(frozen=True, slots=True)
class Draws:
    """Random numbers of one pattern, mean 1; axes: level of the pools, luck, machine."""

    lives: Array
    waits: Array
    luck: Array
    # The rest of a life or a wait seen at a random moment.
    rest_of_life: Array
    rest_of_wait: Array
    start: Array
    rate_factor: Array
    wait_factor: Array


@cache
def draws_of(pattern: Pattern) -> Draws:
    """Draw once for each pattern, with a fixed seed."""
    generator = np.random.default_rng(20261121)
    shape = (NUM_LEVELS, NUM_LUCKS, MACHINES[-1])

    def weibull(k: float) -> Array:
        return np.asarray(generator.weibull(k, size=shape) / math.gamma(1 + 1 / k))

    def rest(k: float) -> Array:
        # A random moment falls into long ones more often, and anywhere in them.
        met = generator.gamma(1 + 1 / k, size=shape[:2]) ** (1 / k) / math.gamma(1 + 1 / k)
        return np.asarray(met * generator.random(shape[:2]))

    level = np.array(
        [NormalDist().inv_cdf((i + 0.5) / NUM_LEVELS) for i in range(NUM_LEVELS)]
    ).reshape(-1, 1, 1)
    return Draws(
        lives=weibull(pattern.life_shape),
        waits=weibull(pattern.wait_shape),
        luck=generator.random(shape),
        rest_of_life=rest(pattern.life_shape),
        rest_of_wait=rest(pattern.wait_shape),
        start=generator.random(shape[:2]),
        rate_factor=np.exp(pattern.rate_spread * level),
        wait_factor=np.exp(pattern.wait_spread * level),
    )
