"""The pattern of interruptions at a given rate: bursty lives and waits, pools of unknown quality.

Random numbers are drawn once for each pattern with a fixed seed, so that the same question has the
same answer.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

# Samples: levels of pool quality in equal steps of probability, times random draws in each.
NUM_LEVELS, NUM_LUCKS = 20, 12
# Machines simulated in a row: as few as are enough; longer runs are extrapolated.
MACHINES = (8, 24, 72)

# AWS: two minutes, "best effort". No figure is published; one in twenty missing is our assumption.
NOTICE_SECONDS, NOTICE_ARRIVES = 120.0, 0.95
# A rate below this, in interruptions per hour, counts as never.
NEVER = 1e-9
# The number of zones behind the spread between zones: few leave the tails unknown.
ZONES_SEEN = 30

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """The pattern of interruptions at a given rate.

    life_shape, wait_shape   Weibull shapes: 1 is Poisson, less means many short and a few long
    rate_spread, wait_spread   standard deviation of the logarithm between pools, because the
        quality of a run's pool is unknown until it runs there; bad pools are bad in both
    starts_anywhen   the run starts at any moment, perhaps with no machine available
    """

    life_shape: float
    wait_shape: float
    rate_spread: float
    wait_spread: float
    starts_anywhen: bool


# From the five traces of sizing/spot/interruptions.py: shapes of lives 0.46 to 0.69; of waits 0.45
# to 0.78 by their moments, which come out 0.05 too high in samples of 40 to 250. Standard deviation
# of the logarithms between zones 0.93 (rate) and 0.68 (wait). Other GPUs and years than those
# traced add 0.6 to the rate's (assumed): sqrt(0.93^2 + 0.6^2) = 1.1. ZONES_SEEN are these five and
# 25 that this project does not have: median rate 0.386, p90 of 24 h of work 127 h.
# The share of the waits' spread that goes with the rate: the five zones say 0.87 (-0.06 to 0.99 in
# 95 % of such fives); 0.6 is the most that does not far exceed the 127 h.
WAITS_WITH_RATE = 0.6
SEEN = Pattern(
    life_shape=0.55,
    wait_shape=0.5,
    rate_spread=1.1,
    wait_spread=0.68 * WAITS_WITH_RATE,
    starts_anywhen=True,
)
# The pools of one region may be out together: in its worst tenth a fleet waits as one zone does,
# 0.61 e^(1.15 t) = 1.66 e^(0.41 t) where t is 1.33. It was 0.4, from five overlapping fleets: in
# three  others, 77 to 85 % of the jobs' hours stayed below that p90.
SEEN_IN_FLEETS = replace(SEEN, wait_spread=1.15)


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
    """Draw random numbers once for each pattern, with a fixed seed."""
    generator = np.random.default_rng(20261121)
    shape = (NUM_LEVELS, NUM_LUCKS, MACHINES[-1])

    # In equal steps of probability over the samples of a level, in random order for each machine:
    # this keeps luck out of a level's mean, from which long runs are extrapolated.
    steps = np.broadcast_to(np.arange(NUM_LUCKS)[:, None], shape)

    def weibull(k: float) -> Array:
        share = (generator.permuted(steps, axis=1) + generator.random(shape)) / NUM_LUCKS
        return np.asarray((-np.log1p(-share)) ** (1 / k) / math.gamma(1 + 1 / k))

    def rest(k: float) -> Array:
        # A random moment falls more often into a long one, and anywhere in it.
        met = generator.gamma(1 + 1 / k, size=shape[:2]) ** (1 / k) / math.gamma(1 + 1 / k)
        return np.asarray(met * generator.random(shape[:2]))

    level = np.array(
        [unseen_zone((place + 0.5) / NUM_LEVELS) for place in range(NUM_LEVELS)]
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


def unseen_zone(share: float) -> float:
    """Return the quantile `share` of unseen zones, in standard deviations of the seen ones.

    Student's t with one degree of freedom less than zones, by its expansion around the normal
    (Abramowitz and Stegun, 26.7.5), because the mean of the seen zones is uncertain too.
    """
    z, nu = NormalDist().inv_cdf(share), ZONES_SEEN - 1
    quantile = z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
    quantile += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    return quantile * math.sqrt(1 + 1 / ZONES_SEEN)
