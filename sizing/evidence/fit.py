"""Fit the step-time constants to published runs, and predict each run from a fit without it.

Least squares of log(predicted / measured), Huber's loss (one odd run must not move the rest), and a
prior that keeps the few constants near what physics says. A test compares them with fitted.json.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sizing.evidence.truths import Truth, gpu_of, predictable, step_of
from sizing.models.fitted import ErrorRange
from sizing.models.step_time import features, time_factor_of

Values = npt.NDArray[np.float64]
PRECISIONS = ("half", "tf32", "float32")
# The prior: products at 0.77 of their peak, kept bytes moved 8 times; and how sure that is (a
# standard deviation in log). A feature is worth nothing, to within a factor of exp(0.5).
_FACTOR, _FACTOR_SURE = 1.3, 0.5
_PASSES, _PASSES_SURE = 8.0, 1.0
_FEATURE_SURE = 0.5
# Runs scatter by this much; beyond `_HUBER` an error counts by its size, no longer by its square.
_SCATTER, _HUBER = 0.14, 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Published runs as arrays: seconds at peak, features and weights, one line for each run."""

    compute: Values
    traffic: Values
    optimizer: Values
    measured: Values
    precisions: Values
    features: Values
    weights: Values

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Rows":
        """Return some of the rows."""
        return Rows(**{name: getattr(self, name)[chosen] for name in self.__slots__})


def rows_of(truths: Sequence[Truth]) -> Rows:
    """Return runs as arrays; a model with many runs weighs less in each."""
    often = Counter(truth.model for truth in truths)
    steps = [(truth, step_of(truth), gpu_of(truth)) for truth in truths]
    weights = _array(often[truth.model] ** -0.5 for truth in truths)
    return Rows(
        compute=_array(
            s.samples * s.flops_per_sample / g.peak_flops(s.precision) for _, s, g in steps
        ),
        traffic=_array(
            s.samples * s.kept_bytes_per_sample / (g.bandwidth_gb_per_second * 1e9)
            for _, s, g in steps
        ),
        optimizer=_array(
            s.optimizer_traffic_bytes / (g.bandwidth_gb_per_second * 1e9) for _, s, g in steps
        ),
        measured=_array(truth.batch / truth.measured for truth in truths),
        precisions=_array(
            [float(time_factor_of(s.precision) == name) for name in PRECISIONS] for _, s, _ in steps
        ),
        features=_array(list(features(s, g).values()) for _, s, g in steps),
        weights=weights / weights.mean(),
    )


def _array(values: Any) -> Values:
    return np.array(list(values), dtype=np.float64)


def seconds(rows: Rows, found: Values) -> Values:
    """Return the predicted seconds of each run's step."""
    compute = rows.compute * np.exp(rows.precisions @ found[:3])
    traffic = rows.traffic * np.exp(found[3])
    total: Values = (compute + traffic) * np.exp(rows.features @ found[4:]) + rows.optimizer
    return total


def fit(rows: Rows) -> Values:
    """Return the logarithms of three time factors and of the passes, then the exponents."""
    # Slow to import, and only needed here.
    from scipy.optimize import least_squares

    num_features = rows.features.shape[1]
    prior = np.concatenate([np.log([_FACTOR] * 3 + [_PASSES]), np.zeros(num_features)])
    sure = _array([_FACTOR_SURE] * 3 + [_PASSES_SURE] + [_FEATURE_SURE] * num_features)

    def residuals(found: Values) -> Values:
        errors = np.log(seconds(rows, found) / rows.measured)
        size = np.abs(errors)
        huber = np.where(size < _HUBER, size, np.sqrt(_HUBER * np.abs(2 * size - _HUBER)))
        runs = np.sqrt(rows.weights) * np.copysign(huber, errors) / _SCATTER
        return np.concatenate([runs, (found - prior) / sure])

    return np.asarray(least_squares(residuals, prior, method="lm").x, dtype=np.float64)


@cache
def without(what: str) -> tuple[float, ...]:
    """Return measured / predicted seconds of each throughput row, from a fit without similar rows.

    `what` says which rows are left out: `model`, `chip`, `lab`, `code`, or `model and chip`.
    """
    truths = predictable("throughput")
    rows = rows_of(truths)
    ratios = np.zeros(len(truths))
    for group in dict.fromkeys(LIKE[what](truth) for truth in truths):
        same = np.array([LIKE[what](truth) == group for truth in truths])
        found = fit(rows_of([truth for truth in truths if not is_like(what, truth, group)]))
        ratios[same] = rows.measured[same] / seconds(rows.where(same), found)
    return tuple(float(ratio) for ratio in ratios)


# Lambda's benchmark runs NVIDIA's code, in NVIDIA's containers.
_CODE = {"Lambda": "NVIDIA"}
LIKE: Mapping[str, Callable[[Truth], tuple[str, ...]]] = {
    "model": lambda truth: (truth.architecture,),
    "chip": lambda truth: (truth.chip,),
    "lab": lambda truth: (truth.lab,),
    "code": lambda truth: (_CODE.get(truth.lab, truth.lab),),
    "model and chip": lambda truth: (truth.architecture, truth.chip),
}


def is_like(what: str, truth: Truth, group: tuple[str, ...]) -> bool:
    """Whether a row shares the group's model, chip, ...; for two criteria, either of them."""
    return any(own == of_group for own, of_group in zip(LIKE[what](truth), group, strict=True))


def interval(ratios: Sequence[float]) -> ErrorRange:
    """Return p10 and p90 of measured / predicted, slightly wider if there are few runs."""
    ordered = sorted(ratios)
    last = len(ordered) - 1
    low = max(0, math.floor(0.1 * (last + 2)) - 1)
    high = min(last, math.ceil(0.9 * (last + 2)) - 1)
    return ErrorRange(low=min(1.0, ordered[low]), high=max(1.0, ordered[high]), runs=len(ordered))


# A buyer's run differs from all of these in its lab, and may in its model and chip.
UNLIKE = ("lab", "model and chip")


def expected(kind: str, unlike: tuple[str, tuple[str, ...]] | None = None) -> ErrorRange:
    """Return the outermost p10 and p90 of any lab's runs of a kind, among those `unlike` a group.

    Each is predicted by a fit without its lab, and by one without its model and chip. For a kind
    with only one run, all kinds count.
    """
    found: list[ErrorRange] = []
    for what in UNLIKE:
        of_lab: dict[str, list[float]] = {}
        for truth, ratio in zip(predictable("throughput"), without(what), strict=True):
            counts = unlike is None or not is_like(unlike[0], truth, unlike[1])
            if counts and kind in ("", step_of(truth).kind):
                of_lab.setdefault(truth.lab, []).append(ratio)
        found += [interval(ratios) for ratios in of_lab.values() if len(ratios) > 1]
    if not found:
        return expected("", unlike)
    return ErrorRange(
        low=min(each.low for each in found),
        high=max(each.high for each in found),
        runs=sum(each.runs for each in found) // len(UNLIKE),
    )


def covered(what: str) -> tuple[int, int]:
    """Return how many runs lie within the interval of runs unlike them, and out of how many.

    `what` was left out of the fit and of the runs that form the interval.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for truth, ratio in zip(predictable("throughput"), without(what), strict=True):
        groups.setdefault((step_of(truth).kind, LIKE[what](truth)), []).append(ratio)
    inside = 0
    for (kind, group), ratios in groups.items():
        found = expected(kind, unlike=(what, group))
        inside += sum(found.low <= ratio <= found.high for ratio in ratios)
    return inside, sum(map(len, groups.values()))
