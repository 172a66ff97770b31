"""Spot: how often a machine is taken away, what that costs, and how often to save.

`estimate` gives hours and dollars as a distribution, `recommend_interval` the checkpoint interval.
"""

from sizing.spot.forecast import Estimate, estimate
from sizing.spot.interruptions import Interruptions, interruptions
from sizing.spot.interval import (
    Interval,
    daly_interval,
    recommend_interval,
)
from sizing.spot.pattern import POISSON, SEEN, Pattern
from sizing.spot.traces import Trace, load_trace

__all__ = [
    "POISSON",
    "SEEN",
    "Estimate",
    "Interruptions",
    "Interval",
    "Pattern",
    "Trace",
    "daly_interval",
    "estimate",
    "interruptions",
    "load_trace",
    "recommend_interval",
]
