"""Spot: how often a machine is taken away, what that costs, and how often to save.

`estimate` gives hours and dollars as a distribution, `recommend_interval` the checkpoint interval.
"""

from sizing.spot.forecast import POISSON, SEEN, Estimate, Pattern, estimate
from sizing.spot.interruptions import Interruptions, interruptions
from sizing.spot.interval import Interval, daly_interval, recommend_interval

__all__ = [
    "POISSON",
    "SEEN",
    "Estimate",
    "Interruptions",
    "Interval",
    "Pattern",
    "daly_interval",
    "estimate",
    "interruptions",
    "recommend_interval",
]
